"""Limits of prompts and options, and what the engine core gets."""

from typing import Any

import pytest

from jaxserve.engine.input_processor import InputProcessor, SequenceRequest
from jaxserve.errors import RequestError
from jaxserve.messages import MAX_STOP_TOKEN_IDS, EngineCoreRequest
from jaxserve.messages import SamplingParams as CoreSamplingParams
from jaxserve.sampling_params import SamplingParams
from tests.fakes_engine import EOS, VOCAB_SIZE, byte_level_tokenizer, make_config


def process(
    prompt: list[int] | None = None, config: dict | None = None, **params: Any
) -> list[SequenceRequest]:
    processor = InputProcessor(make_config(**config or {}), byte_level_tokenizer())
    return processor.process(prompt or [1, 2, 3], SamplingParams(**params), arrival_time_s=7.0)


def core_params(**params: Any) -> CoreSamplingParams:
    return process(**params)[0].core.sampling


def test_everything_reaches_the_engine_core() -> None:
    processor = InputProcessor(make_config(scheduling_policy="priority"), byte_level_tokenizer())
    params = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        seed=11,
        max_tokens=20,
        min_tokens=2,
        stop=["x", "y"],
        stop_token_ids=[9, 8],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    (sequence,) = processor.process(
        [4, 5],
        params,
        arrival_time_s=3.5,
        priority=-2,
        cache_salt="tenant",
        final_only=True,
        first_index=6,
    )
    assert sequence == SequenceRequest(
        core=EngineCoreRequest(
            request_id=sequence.core.request_id,
            prompt_token_ids=[4, 5],
            sampling=CoreSamplingParams(
                max_tokens=20,
                temperature=0.5,
                top_k=40,
                top_p=0.9,
                min_p=0.05,
                seed=11,
                min_tokens=2,
                stop_token_ids=(EOS, 9, 8),
            ),
            arrival_time_s=3.5,
            priority=-2,
            cache_salt="tenant",
        ),
        index=6,
        stop=("x", "y"),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        final_only=True,
    )


def test_values_that_are_off_are_zero_or_one_for_the_engine() -> None:
    sampling = core_params(top_k=-1)
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    assert core_params(top_k=VOCAB_SIZE).top_k == 0, "all tokens is no limit"
    assert core_params(top_k=VOCAB_SIZE - 1).top_k == VOCAB_SIZE - 1
    nothing = core_params(top_p=0.0, top_k=5)
    assert (nothing.top_k, nothing.top_p) == (1, 1.0), "the smallest set is the best token"


def test_ignore_eos_leaves_only_the_requested_stop_tokens() -> None:
    assert core_params(ignore_eos=True, stop_token_ids=[3, 3]).stop_token_ids == (3,)
    assert core_params(stop_token_ids=[EOS, 3]).stop_token_ids == (EOS, 3)


def test_choices_have_consecutive_seeds_and_distinct_ids() -> None:
    sequences = process(n=3, seed=2**64 - 2)
    assert [s.core.sampling.seed for s in sequences] == [2**64 - 2, 2**64 - 1, 0]
    assert [s.index for s in sequences] == [0, 1, 2]
    assert len({s.core.request_id for s in sequences}) == 3
    assert core_params(seed=-1).seed == 2**64 - 1


def test_seeds_are_random_or_follow_from_the_config() -> None:
    assert core_params().seed != core_params().seed

    def seeds(config_seed: int) -> list[int]:
        processor = InputProcessor(make_config(seed=config_seed), byte_level_tokenizer())
        made = [processor.process([1], SamplingParams(), arrival_time_s=0) for _ in range(3)]
        return [sequence.core.sampling.seed for (sequence,) in made]

    assert seeds(5) == seeds(5)
    assert seeds(5) != seeds(6)
    assert len(set(seeds(5))) == 3


@pytest.mark.parametrize(
    ("num_prompt", "given", "default", "expected"),
    (
        (10, None, 16, 16),
        (190, None, 16, 10),
        (10, None, None, 190),
        (10, 190, 16, 190),
        (199, 1, None, 1),
    ),
)
def test_max_tokens(num_prompt: int, given: int | None, default: int | None, expected: int) -> None:
    (sequence,) = InputProcessor(make_config(), byte_level_tokenizer()).process(
        [1] * num_prompt,
        SamplingParams(max_tokens=given),
        arrival_time_s=0,
        default_max_tokens=default,
    )
    assert sequence.core.sampling.max_tokens == expected


TOO_MANY_STOPS = list(range(MAX_STOP_TOKEN_IDS))


@pytest.mark.parametrize(
    ("prompt", "params", "param", "text"),
    (
        ([1] * 200, {}, "prompt", "200 tokens"),
        ([1] * 150, {"max_tokens": 51}, "max_tokens", "at most 50, not 51"),
        ([1, VOCAB_SIZE], {}, "prompt[1]", f"{VOCAB_SIZE} is not in the vocabulary"),
        ([1, 2, -1], {}, "prompt[2]", "-1 is not in the vocabulary"),
        ([1] * 150, {"min_tokens": 51}, "min_tokens", "50 tokens"),
        ([1], {"stop_token_ids": [1, VOCAB_SIZE]}, "stop_token_ids[1]", "vocabulary"),
        ([1], {"stop_token_ids": TOO_MANY_STOPS}, "stop_token_ids", "up to 31"),
    ),
)
def test_limits(prompt: list[int], params: dict, param: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        process(prompt, **params)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert text in caught.value.message


def test_an_empty_prompt_is_refused_under_its_own_path() -> None:
    with pytest.raises(RequestError) as caught:
        InputProcessor(make_config(), byte_level_tokenizer()).process(
            [], SamplingParams(), arrival_time_s=0, prompt_param="prompt[3]"
        )
    assert caught.value.param == "prompt[3]"


def test_stop_token_ids_fill_the_room_that_ignored_eos_leaves() -> None:
    assert len(core_params(ignore_eos=True, stop_token_ids=TOO_MANY_STOPS).stop_token_ids) == 32


def test_priority_needs_the_policy_that_reads_it() -> None:
    processor = InputProcessor(make_config(), byte_level_tokenizer())
    with pytest.raises(RequestError) as caught:
        processor.process([1], SamplingParams(), arrival_time_s=0, priority=1)
    assert caught.value.param == "priority"
    assert "--scheduling-policy priority" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    (
        *(("n", value) for value in (0, -1, 129, 1.5, True, "1")),
        *(("temperature", value) for value in (-0.1, 100.5, float("nan"), float("inf"), "hot")),
        *(("top_p", value) for value in (-0.1, 1.01, float("nan"), None)),
        *(("top_k", value) for value in (-2, 2**31, 0.5)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("seed", value) for value in (2**64, -(2**63) - 1, 0.5)),
        *(("max_tokens", value) for value in (-5, 2**31)),
        *(("min_tokens", value) for value in (-1, None)),
        *(("stop", value) for value in ("", ["x"] * 17, "x" * 1025)),
        *(("ignore_eos", value) for value in (1, None)),
        *(("skip_special_tokens", value) for value in ("no",)),
        *(("include_stop_str_in_output", value) for value in (0,)),
    ),
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("params", "param"),
    (
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids[0]"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ),
)
def test_values_that_do_not_fit(params: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == param


def test_a_huge_number_is_not_printed_whole() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=10**400)
    assert len(caught.value.message) < 100
