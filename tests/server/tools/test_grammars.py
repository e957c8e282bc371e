"""Every sentence of a format's grammar is read back as valid calls of the tools."""

import json
import random

import llguidance
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.server.reasoning import REASONING_PARSERS
from jaxserve.server.tools import JSON_FORMAT, TOOL_PARSERS, FunctionTool
from tests.server.tools.reading import TOOLS, read

_NAMES = {_format: name for name, _format in reversed(TOOL_PARSERS.items())}
# One name for each format.
FORMATS = {**{name: _format for _format, name in _NAMES.items()}, "json": JSON_FORMAT}
ALL_TOOLS = (
    *TOOLS,
    FunctionTool("a-b_1", parameters={"type": "object", "properties": {"x": {"type": "null"}}}),
    FunctionTool(
        "edit",
        parameters={
            "properties": {
                "mode": {"enum": ["append", "7", "", "null"]},
                "text": {"type": "string"},
                "count": {"type": ["integer", "null"], "minimum": -3},
                "ratio": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                "options": {"type": "object", "additionalProperties": {"type": "boolean"}},
                "any": {},
            },
            "required": ["text", "ratio"],
            "additionalProperties": False,
        },
    ),
)
# Tools whose arguments cannot be written one by one.
CONSTRAINED = FunctionTool("pick", parameters={"anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
ODD_NAME = FunctionTool('say "hi" <b>\n')
MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    """A token a byte, and gpt-oss's markers."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*MARKERS, "<eos>"])
    eos_token = tokenizer.token_to_id("<eos>")
    return llguidance.LLTokenizer(tokenizer.to_str(), eos_token=eos_token)


def matcher_of(tokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


# Free text ends here, which chance would not write.
END_OF_TEXT = "\n</parameter>\n"


def sentence(tokenizer, grammar: str, seed: int) -> str | None:
    """A random sentence, that soon tends to its end; None when it does not come to one."""
    rng = random.Random(seed)
    matcher = matcher_of(tokenizer, grammar)
    closing = set(tokenizer.tokenize_str('"}]<>\n)')) | set(range(256, 256 + len(MARKERS)))
    end_of_text = tokenizer.tokenize_str(END_OF_TEXT)
    token_ids: list[int] = []
    while not matcher.is_stopped():
        if matcher.is_accepting() and rng.random() < 0.3:
            break
        if len(token_ids) > 1500:
            return None
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        choices = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
        choices = [i for i in choices if i != tokenizer.eos_token]
        chosen = [rng.choice(choices)]
        if rng.random() < len(token_ids) / 400:
            chosen = [rng.choice([i for i in choices if i in closing] or choices)]
            if max(choices) < 256 and matcher.validate_tokens(end_of_text) == len(end_of_text):
                chosen = end_of_text
        token_ids += chosen
        assert matcher.consume_tokens(chosen), matcher.get_error()
    return text_of(tokenizer, token_ids)


def text_of(tokenizer, token_ids: list[int]) -> str:
    """Special tokens with their text."""
    return b"".join(
        MARKERS[i - 256].encode() if i >= 256 else tokenizer.decode_bytes([i]) for i in token_ids
    ).decode(errors="replace")


def assert_valid_calls(name: str, text: str, tools, *, parallel: bool) -> int:
    answer = read(FORMATS[name], [text], tools)
    assert not answer.content, text
    assert answer.calls, text
    assert parallel or len(answer.calls) == 1
    schemas = {tool.name: tool.arguments_schema() for tool in tools}
    for called, arguments in answer.calls:
        Draft202012Validator(schemas[called]).validate(json.loads(arguments))
    return len(answer.calls)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_sentences_are_valid_calls(name, parallel, tokenizer):
    grammar = FORMATS[name].grammar(ALL_TOOLS, parallel=parallel)
    assert grammar is not None
    texts = [sentence(tokenizer, grammar, seed) for seed in range(30)]
    texts = [text for text in texts if text is not None]
    assert len(texts) > 20
    most = max(assert_valid_calls(name, text, ALL_TOOLS, parallel=parallel) for text in texts)
    assert most > 1 or not parallel


ONE_BY_ONE = {"llama4_pythonic", "olmo3", "qwen3_coder"}


@pytest.mark.parametrize("name", FORMATS)
def test_other_schemas(name, tokenizer):
    tools = (*TOOLS, CONSTRAINED)
    grammar = FORMATS[name].grammar(tools, parallel=True)
    if name in ONE_BY_ONE:
        assert grammar is None
    else:
        assert grammar is not None
        text = sentence(tokenizer, grammar, 0)
        assert text is not None
        assert_valid_calls(name, text, tools, parallel=True)


@pytest.mark.parametrize("name", FORMATS)
def test_odd_names_are_quoted_or_refused(name, tokenizer):
    grammar = FORMATS[name].grammar([ODD_NAME], parallel=False)
    quotes = "deepseek" not in name and name != "openai" and name not in ONE_BY_ONE
    assert (grammar is not None) == quotes
    if grammar:
        text = sentence(tokenizer, grammar, 0)
        assert text is not None
        assert_valid_calls(name, text, [ODD_NAME], parallel=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2},
        {"type": "string", "pattern": "^a$"},
        {"type": ["string", "integer"]},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": ["a", 1]},
        {"enum": ["</parameter>"]},
        {"$ref": "#/$defs/x"},
    ],
)
def test_qwen3_coder_refuses_strings_that_text_cannot_hold(schema):
    tool = FunctionTool("f", parameters={"properties": {"a": schema}})
    assert FORMATS["qwen3_coder"].grammar([tool], parallel=False) is None


def consumed_of(tokenizer, grammar: str | None, text: str) -> str:
    """How much of the text the grammar allows."""
    assert grammar is not None
    matcher = matcher_of(tokenizer, grammar)
    token_ids = tokenizer.tokenize_str(text)
    return text_of(tokenizer, token_ids[: matcher.try_consume_tokens(token_ids)])


def test_qwen3_coder_keeps_end_tags_out_of_strings(tokenizer):
    tool = FunctionTool("f", parameters={"properties": {"a": {"type": "string"}}})
    grammar = FORMATS["qwen3_coder"].grammar([tool], parallel=False)
    before = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter"
    after = ">\n</function>\n</tool_call>"
    assert consumed_of(tokenizer, grammar, before + after) == before + after
    assert consumed_of(tokenizer, grammar, f"{before}s>") == f"{before}s>"
    inline = before.replace("x\n", "x")
    assert consumed_of(tokenizer, grammar, f"{inline}>") == inline


def test_every_tool_can_be_called_and_no_other(tokenizer):
    grammar = JSON_FORMAT.grammar(ALL_TOOLS, parallel=True)

    def consumed(text: str) -> str:
        return consumed_of(tokenizer, grammar, text)

    text = (
        '[{"name": "get_weather", "parameters": {"city": "Zürich", "days": 1, "units": "c"}}, '
        '{"name": "a-b_1", "parameters": {"x": null}}, {"name": "now", "parameters": {}}]'
    )
    assert consumed(text) == text
    assert consumed('[{"name": "nowhere') == '[{"name": "now'
    assert consumed('[{"name": "get_weather", "parameters": {}}]').endswith('"parameters": {')
    assert consumed('[{"name": "now", "parameters": {  ').endswith("{")
    assert consumed("[]") == "["


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>yes", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
         True),
        ("<|channel|>final<|message|>no", False),
        ("<|channel|>analysis<|message|>yes", False),
        ("yes", False),
    ],
)  # fmt: skip
def test_an_answer_of_gpt_oss_is_in_its_channel(text, expected, tokenizer):
    grammar = REASONING_PARSERS["openai_gptoss"].with_reasoning('start: "yes"', "")
    matcher = matcher_of(tokenizer, grammar)
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    consumed = matcher.try_consume_tokens(token_ids)
    assert (consumed == len(token_ids) and matcher.is_accepting()) == expected
