"""Every option of a request reaches what it is for: the engine's parameters, or the answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from jaxserve.messages import SamplingParams as CoreSamplingParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.anthropic import decode_messages_request
from jaxserve.server.protocol.chat import decode_chat_request
from jaxserve.server.protocol.completions import CompletionRequest, decode_completion_request
from jaxserve.server.protocol.decoding import BodyDecoder
from jaxserve.server.protocol.embeddings import decode_embedding_request
from jaxserve.server.protocol.responses import decode_responses_request
from jaxserve.server.protocol.tokenize import decode_detokenize_request, decode_tokenize_request
from tests.fakes_engine import EOS, FakeServer, fake_server, says
from tests.server.test_routes import events

COMPLETIONS = "/v1/completions"
HI_THERE = "hi there"
LONG = says("hi there " * 10)


def run(test: Callable[[FakeServer], Awaitable[None]], *args: Any, **config: object) -> None:
    async def main() -> None:
        async with fake_server(*args, **config) as server:
            await asyncio.wait_for(test(server), 20)

    asyncio.run(main())


PROCESSORS = (("halve", 0), ("scale", 2))

# A value of each option, and the engine's parameters that it changes.
REACH_THE_ENGINE: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.25, {"temperature": 0.25}),
    "top_p": (0.75, {"top_p": 0.75}),
    "top_k": (7, {"top_k": 7}),
    "min_p": (0.125, {"min_p": 0.125}),
    "seed": (2**63 + 5, {"seed": 2**63 + 5}),
    "max_tokens": (9, {"max_tokens": 9}),
    "min_tokens": (3, {"min_tokens": 3}),
    "stop_token_ids": ([5, 6], {"stop_token_ids": (EOS, 5, 6)}),
    "ignore_eos": (True, {"stop_token_ids": ()}),
    "presence_penalty": (-1.5, {"presence_penalty": -1.5}),
    "frequency_penalty": (2, {"frequency_penalty": 2.0}),
    "repetition_penalty": (1.25, {"repetition_penalty": 1.25}),
    "logit_bias": ({"5": -100, "7": 2.5}, {"logit_bias": ((5, -100.0), (7, 2.5))}),
    "allowed_token_ids": ([9, 8, 9], {"allowed_token_ids": (9, 8)}),
    "bad_words": (["ab"], {"bad_words": ((97, 98),)}),
    "logits_processors": (
        ["halve", {"qualname": "scale", "args": [2, 0.5]}],
        {"logits_processors": (("halve", ()), ("scale", (2.0, 0.5)))},
    ),
    "logprob_token_ids": ([4, 2], {"logprob_token_ids": (4, 2), "logprobs": 0}),
    "logprobs": (5, {"logprobs": 5}),
    "prompt_logprobs": (4, {"prompt_logprobs": 4}),
}
# Options that change something else; each has a test of its own.
REACH_THE_ANSWER = {
    *("model", "prompt", "n", "stop", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "echo"),
    *("return_token_ids", "return_tokens_as_token_ids", "stream", "stream_options"),
    *("add_special_tokens", "priority", "cache_salt", "request_id"),
    *("response_format", "structured_outputs"),
}
WITHOUT_EFFECT = {"user"}


def test_every_option_is_tested() -> None:
    """A field that is added must be in one of the tables."""
    known = REACH_THE_ENGINE.keys() | REACH_THE_ANSWER | WITHOUT_EFFECT
    assert set(CompletionRequest.__struct_fields__) <= known


@pytest.mark.parametrize("name", sorted(REACH_THE_ENGINE))
def test_an_option_reaches_the_engine(name: str) -> None:
    """It, and nothing else, changes what the engine gets."""
    value, expected = REACH_THE_ENGINE[name]

    async def test(server: FakeServer) -> None:
        body = {"prompt": HI_THERE} | ({} if name == "seed" else {"seed": 1})
        plain = await server.post(COMPLETIONS, **body | {"seed": 1})
        response = await server.post(COMPLETIONS, **body, **{name: value})
        assert (plain.status_code, response.status_code) == (200, 200), response.text
        before, after = (request.sampling for request in server.core.requests)
        changed = {
            field: getattr(after, field)
            for field in CoreSamplingParams.__struct_fields__
            if getattr(after, field) != getattr(before, field)
        }
        assert changed == expected

    run(test, LONG, logits_processors=PROCESSORS)


def test_a_request_with_every_option_is_one_request() -> None:
    async def test(server: FakeServer) -> None:
        options = {name: value for name, (value, _) in REACH_THE_ENGINE.items()}
        response = await server.post(COMPLETIONS, prompt=HI_THERE, **options)
        assert response.status_code == 200, response.text
        sampling = server.core.requests[0].sampling
        assert sampling.logit_bias and sampling.bad_words and sampling.prompt_logprobs == 4

    run(test, LONG, logits_processors=PROCESSORS)


@pytest.mark.parametrize(
    ("processors", "param", "text"),
    (
        (["other"], "logits_processors[0]", "there is halve, scale"),
        (["halve", "scale"], "logits_processors[1]", "takes 2 arguments, got 0"),
        ([{"qualname": "halve", "args": [1]}], "logits_processors[0]", "takes 0 arguments, got 1"),
        (["halve"] * 9, "logits_processors", "up to 8"),
    ),
)
def test_a_logits_processor_must_fit(processors: list, param: str, text: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(COMPLETIONS, prompt="x", logits_processors=processors)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert text in error["message"]

    run(test, logits_processors=PROCESSORS)


def test_neutral_values_change_nothing() -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
        "logits_processors": [],
        "logprob_token_ids": [],
        "stop": [],
        "stop_token_ids": [],
        "return_token_ids": False,
        "echo": False,
    }

    async def test(server: FakeServer) -> None:
        plain = await server.post(COMPLETIONS, prompt="x", seed=1, request_id="r")
        same = await server.post(COMPLETIONS, prompt="x", seed=1, request_id="r", **neutral)
        before, after = server.core.requests
        assert before.sampling == after.sampling
        assert msgspec.structs.replace(before, request_id="", arrival_time_s=0) == (
            msgspec.structs.replace(after, request_id="", arrival_time_s=0)
        )
        assert plain.json()["choices"] == same.json()["choices"]

    run(test)


@pytest.mark.parametrize(
    ("words", "sequences"),
    (
        # " the" is one token, "the" are two.
        (["the"], ((116, 260), (258,))),
        ([" the", "the"], ((116, 260), (258,))),
        # Behind a space "x" is two tokens, of which the second is "x" itself.
        (["x"], ((120,),)),
        (["é!"], (tuple("é!".encode()),)),
        (["x", "the", "x"], ((120,), (116, 260), (258,))),
    ),
)
def test_bad_words_are_those_at_the_start_and_behind_a_space(words: list, sequences: tuple) -> None:
    async def test(server: FakeServer) -> None:
        await server.post(COMPLETIONS, prompt="x", bad_words=words)
        assert server.core.requests[0].sampling.bad_words == sequences

    run(test)


def test_too_many_bad_words_are_refused() -> None:
    async def test(server: FakeServer) -> None:
        words = [f"{i:03}" for i in range(129)]
        for wrong in (words, ["the", *words[2:]], ["x"] * 1_000_000):
            response = await server.post(COMPLETIONS, prompt="x", bad_words=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")
        assert (await server.post(COMPLETIONS, prompt="x", bad_words=words[1:])).status_code == 200

    run(test)


def test_as_many_token_ids_as_a_body_holds_hold_nobody_up() -> None:
    async def test(server: FakeServer) -> None:
        ids = [5, 6] * 1_000_000
        started_s = time.process_time()
        SamplingParams(allowed_token_ids=ids, stop_token_ids=ids)
        assert time.process_time() - started_s < 0.5
        response = await server.post(COMPLETIONS, prompt="x", allowed_token_ids=ids)
        assert response.status_code == 200
        assert server.core.requests[0].sampling.allowed_token_ids == (5, 6)

    run(test)


@pytest.mark.parametrize(
    ("options", "kept"),
    (
        ({"truncate_prompt_tokens": 3}, "567"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "123"),
        ({"truncate_prompt_tokens": 7}, "1234567"),
        ({"truncate_prompt_tokens": 100}, "1234567"),
        ({"truncation_side": "right"}, "1234567"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 9, "max_model_len": 12}, "567"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 99, "max_model_len": 12}, None),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1, "max_model_len": 12}, "1234567"),
    ),
)
def test_truncation(options: dict, kept: str | None) -> None:
    options = dict(options)
    config = {"max_model_len": options.pop("max_model_len", 200)}

    async def test(server: FakeServer) -> None:
        for prompt in ("1234567", list(b"1234567")):
            response = await server.post(COMPLETIONS, prompt=prompt, echo=True, **options)
            if kept is None:
                assert response.json()["error"]["param"] == "max_tokens"
                continue
            (request,) = server.core.requests[-1:]
            assert bytes(request.prompt_token_ids) == kept.encode()
            body = response.json()
            assert body["usage"]["prompt_tokens"] == len(kept)
            assert body["choices"][0]["text"].startswith(kept)

    run(test, **config)


def test_a_text_far_too_long_can_be_truncated() -> None:
    async def test(server: FakeServer) -> None:
        text = "x" * 50_000 + "end"
        assert (await server.post(COMPLETIONS, prompt=text)).status_code == 400
        response = await server.post(COMPLETIONS, prompt=text, truncate_prompt_tokens=4)
        assert response.status_code == 200
        assert bytes(server.core.requests[-1].prompt_token_ids) == b"xend"

    run(test)


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("prompt", ("a<|im_end|>é", [97, 257, 0xC3, 0xA9]))
@pytest.mark.parametrize("max_tokens", (0, 4))
def test_echo(stream: bool, prompt: object, max_tokens: int) -> None:
    """A text comes back as it was given, tokens as their text."""

    async def test(server: FakeServer) -> None:
        response = await server.post(
            COMPLETIONS, prompt=prompt, echo=True, max_tokens=max_tokens, stream=stream, n=2
        )
        shown = prompt if isinstance(prompt, str) else "aé"
        texts = ["", ""]
        choices = (
            [choice for chunk in events(response.text) for choice in chunk["choices"]]
            if stream
            else response.json()["choices"]
        )
        for choice in choices:
            texts[choice["index"]] += choice["text"]
        assert texts == [shown + "okay"[:max_tokens]] * 2
        assert {c["finish_reason"] for c in choices} <= {None, "length"}
        if not stream:
            assert response.json()["usage"]["completion_tokens"] == 2 * max_tokens
            assert all(c["logprobs"] is None for c in choices)

    run(test, says("okay?"))


def test_an_echo_of_several_prompts() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(COMPLETIONS, prompt=["ab", "cd"], echo=True, max_tokens=1, n=2)
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == ["abx", "abx", "cdx", "cdx"]

    run(test, says("xyz"))


def test_no_tokens_are_counted_where_none_are_wanted() -> None:
    async def test(server: FakeServer) -> None:
        body = {"prompt": "abc", "max_tokens": 0}
        response = await server.post(COMPLETIONS, **body, prompt_logprobs=0, return_token_ids=True)
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [])
        assert choice["finish_reason"] == "length", "even though the engine's token was a stop"
        assert server.context.metrics.generation_tokens == 0
        assert server.context.metrics.prompt_tokens == 3
        assert (await server.post(COMPLETIONS, **body)).status_code == 400

    run(test, says(""))


@pytest.mark.parametrize("stream", (False, True))
def test_token_ids(stream: bool) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(
            COMPLETIONS, prompt=["ab", "c"], return_token_ids=True, stream=stream
        )
        body = events(response.text) if stream else [response.json()]
        found: dict[int, dict[str, list]] = {}
        for choice in (choice for chunk in body for choice in chunk["choices"]):
            lists = found.setdefault(choice["index"], {"prompt_token_ids": [], "token_ids": []})
            for name in lists:
                lists[name] += choice.get(name, [])
        said = [*"né".encode(), EOS]
        assert found == {
            0: {"prompt_token_ids": [97, 98], "token_ids": said},
            1: {"prompt_token_ids": [99], "token_ids": said},
        }
        plain = await server.post(COMPLETIONS, prompt="ab")
        assert "token_ids" not in plain.json()["choices"][0]

    run(test, says("né"))


def test_continuous_usage() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(
            COMPLETIONS,
            prompt=["abc", "d"],
            n=2,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        *chunks, last = events(response.text)
        counts: dict[int, list] = {}
        for chunk in chunks:
            usage, index = chunk["usage"], chunk["choices"][0]["index"]
            assert usage["prompt_tokens"] == (3 if index < 2 else 1)
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            counts.setdefault(index, []).append(usage["completion_tokens"])
        assert counts == {i: [1, 2, 3] for i in range(4)}
        assert last["usage"]["completion_tokens"] == 12
        assert last["usage"]["prompt_tokens"] == 4
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}

    run(test, says("hi"))


def test_continuous_usage_alone_ends_without_usage_of_all() -> None:
    async def test(server: FakeServer) -> None:
        options = {"continuous_usage_stats": True}
        response = await server.post(COMPLETIONS, prompt="a", stream=True, stream_options=options)
        chunks = events(response.text)
        assert all(chunk["choices"] and chunk["usage"] for chunk in chunks)

    run(test)


@pytest.mark.parametrize(
    "decoder",
    (
        decode_chat_request,
        decode_completion_request,
        decode_detokenize_request,
        decode_embedding_request,
        decode_messages_request,
        decode_responses_request,
        decode_tokenize_request,
    ),
)
def test_every_field_has_a_description(decoder: BodyDecoder) -> None:
    """docs/api.md and /openapi.json are made of them."""
    name = decoder.kind.__name__
    for field, schema in msgspec.json.schema(decoder.kind)["$defs"][name]["properties"].items():
        assert schema.get("description"), (name, field)


@pytest.mark.parametrize(
    ("options", "part"),
    (
        ({"response_format": {"type": "json_object"}}, "object"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "start"),
    ),
)
def test_a_grammar_reaches_the_engine(options: dict, part: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(COMPLETIONS, prompt=["a", "b"], n=2, **options)
        assert response.status_code == 200, response.text
        grammars = [request.grammar for request in server.core.requests]
        assert len(grammars) == 4
        assert len(set(grammars)) == 1
        assert part in (grammars[0] or "")

    run(test)


@pytest.mark.parametrize(
    "options", ({"response_format": {"type": "text"}}, {"structured_outputs": {}})
)
def test_no_grammar_where_any_text_will_do(options: dict) -> None:
    async def test(server: FakeServer) -> None:
        await server.post(COMPLETIONS, prompt="a", **options)
        assert server.core.requests[0].grammar is None

    run(test)
