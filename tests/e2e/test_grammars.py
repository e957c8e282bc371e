"""Every output of the real model that is held to a grammar matches it, at any temperature."""

import json
import re
from collections.abc import Iterator

import jsonschema
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.grammars import grammar_from_choice, grammar_from_json_schema, grammar_from_regex
from jaxserve.llm import GenerationOutput
from tests.e2e.json_schemas import SCHEMAS
from tests.e2e.sizes import SIZES

MAX_TOKENS = 400


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", forbid_compile=True, **SIZES) as llm:
        yield llm


def ask(llm: LLM, task: str, params: list[SamplingParams]) -> list[GenerationOutput]:
    question = [{"role": "user", "content": f"{task} Answer with nothing else."}]
    return llm.chat([question] * len(params), params, use_tqdm=False)


@pytest.mark.parametrize("share", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sixty_schemas(llm: LLM, share: int):
    """Greedy or at temperature 2, in turn; the slow test has the others. All at once."""
    cases = [(name, 2.0 * ((i + share) % 2)) for i, name in enumerate(SCHEMAS)]
    params = [
        SamplingParams(
            grammar=grammar_from_json_schema(SCHEMAS[name]),
            temperature=temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        for seed, (name, temperature) in enumerate(cases)
    ]
    wrong = []
    for case, answer in zip(cases, ask(llm, "Write JSON.", params), strict=True):
        name, schema = case, SCHEMAS[case[0]]
        reason = answer.outputs[0].finish_reason
        if reason != "stop":
            wrong.append((name, reason, answer.text))
            continue
        checker = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        try:
            wrong += [
                (name, e.message, answer.text) for e in checker.iter_errors(json.loads(answer.text))
            ]
        except json.JSONDecodeError as error:
            wrong.append((name, str(error), answer.text))
    assert wrong == []


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_regexes_and_choices(llm: LLM, temperature: float):
    regexes = [
        r"[0-9]{3}-[0-9]{4}",
        r"(yes|no|maybe) [a-z]{2,5}",
        r"[\u4e00-\u9fff]{1,4}",
        r"😀{1,3}!",
    ]
    choices = ["positive", "négatif", "中立", "yes and no", "yes"]
    grammars = [grammar_from_regex(regex) for regex in regexes] + [grammar_from_choice(choices)] * 8
    params = [
        SamplingParams(grammar=grammar, temperature=temperature, seed=seed, max_tokens=60)
        for seed, grammar in enumerate(grammars)
    ]
    answers = ask(llm, "Write anything.", params)
    for regex, answer in zip(regexes, answers, strict=False):
        assert re.fullmatch(regex, answer.text) and answer.outputs[0].finish_reason == "stop"
    assert {answer.text for answer in answers[len(regexes) :]} <= set(choices)


def test_cut_at_max_tokens(llm: LLM):
    grammar = grammar_from_json_schema(
        {"type": "array", "items": {"type": "boolean"}, "minItems": 50}
    )
    params = SamplingParams(grammar=grammar, temperature=0, max_tokens=9)
    (answer,) = ask(llm, "Write JSON.", [params])
    assert answer.outputs[0].finish_reason == "length"
    assert len(answer.outputs[0].token_ids) == 9 and answer.text.startswith("[")


def test_jump_ahead_changes_no_output(llm: LLM):
    """With log-probabilities every token is sampled; without, forced ones are skipped."""
    fields = {f"field_{i}": {"type": "boolean"} for i in range(4)}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    grammar = grammar_from_json_schema(schema | {"additionalProperties": False})
    params = [
        SamplingParams(grammar=grammar, temperature=1, seed=3, max_tokens=300, logprobs=logprobs)
        for logprobs in (None, 0)
    ]
    skipped, sampled = ask(llm, "Write JSON.", params)
    assert skipped.outputs[0].token_ids == sampled.outputs[0].token_ids
