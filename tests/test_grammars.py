"""Grammars accept what they say, nothing else, and refuse what cannot be a grammar."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.errors import RequestError
from jaxserve.grammars import (
    grammar_after_text,
    grammar_from_choice,
    grammar_from_json_object,
    grammar_from_json_schema,
    grammar_from_lark,
    grammar_from_regex,
    grammar_from_structural_tag,
    make_grammar_tokenizer,
    validate_grammar,
)
from tests.fakes_engine import IM_END, IM_START, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = 300
SPECIAL_TOKENS = {IM_START: 256, IM_END: 257}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}


def chain(length: int) -> str:
    """Lark rules, each of which leads to the next."""
    rules = [f'r{i}: "x" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "x"'])


def references(length: int, name: str = "a") -> dict:
    """A schema whose definitions each lead to the next."""
    parts = {f"{name}{i}": {"items": {"$ref": f"#/$defs/{name}{i + 1}"}} for i in range(length)}
    return {"$defs": {**parts, f"{name}{length}": {}}, "$ref": f"#/$defs/{name}0"}


def test_what_would_overflow_the_stack_is_refused() -> None:
    """llguidance recurses over rules and references; an overflow kills the process."""
    with pytest.raises(RequestError, match="over 2000 lines"):
        grammar_from_lark(chain(3000))
    with pytest.raises(RequestError, match="over 65536 characters"):
        grammar_from_lark('start: "a"' + " " * 65_536)
    for name in ("a", 'a"', "a\\"):
        with pytest.raises(RequestError, match=r"over 2000 different \$ref"):
            grammar_from_json_schema(references(20_000, name))


def test_what_is_let_through_fits_on_the_stack_of_a_thread() -> None:
    code = f"""
import threading
from jaxserve.grammars import grammar_from_json_schema, grammar_from_lark
from jaxserve.grammars.pieces import STACK_BYTES
threading.stack_size(STACK_BYTES)
done = []
def check():
    grammar_from_lark({chain(1990)!r})
    grammar_from_json_schema({references(1990)!r})
    done.append(True)
thread = threading.Thread(target=check)
thread.start()
thread.join()
assert done
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def ll_tokenizer() -> LLTokenizer:
    return make_grammar_tokenizer(TOKENIZER, VOCAB_SIZE)


@pytest.fixture
def matches(ll_tokenizer: LLTokenizer) -> Callable[[str, str], bool]:
    """Whether the whole of a text, with the names of special tokens in it, matches a grammar."""

    def matches(grammar: str, text: str) -> bool:
        matcher = LLMatcher(ll_tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return matches


Matches = Callable[[str, str], bool]


def check(matches: Matches, grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not matches(grammar, text)] == []
    assert [text for text in wrong if matches(grammar, text)] == []


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}},
    "required": ["a"],
}


def test_json_schema(matches: Matches) -> None:
    right = ['{"a":{"b":1}}', '{"a":{"c":[]}}', '{ "a" : {\n    "b": -7\n  }\r\n}']
    wrong = ["{}", '{"a":{"b":"1"}}', '{"a":{}} ', '{"a":{}', "[]", '{"a":' + " " * 41 + "{}}"]
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        check(matches, grammar_from_json_schema(schema), right, wrong)


def test_options_of_json(matches: Matches) -> None:
    compact = grammar_from_json_schema(SCHEMA, any_whitespace=False)
    check(matches, compact, ['{"a":{}}'], ['{"a": {}}', '{"a":\n{}}'])
    own = grammar_from_json_schema(SCHEMA, whitespace_pattern=" ")
    check(matches, own, ['{ "a": {}}'], ['{"a":  {}}', '{"a":\n{}}'])
    closed = grammar_from_json_schema(SCHEMA, additional_properties=False)
    check(matches, closed, ['{"a":{"b":1}}'], ['{"a":{"c":1}}', '{"a":{},"c":1}'])
    of_schema = grammar_from_json_schema({**SCHEMA, "x-guidance": {"key_separator": " : "}})
    check(matches, of_schema, ['{"a" : {}}'], ['{"a":{}}'])


def test_json_object(matches: Matches) -> None:
    right = ["{}", '{"é": [1, {"x": null}], "y": "\\u0001\\n😀"}']
    check(matches, grammar_from_json_object(), right, ["[]", '"a"', "{}{}"])
    check(matches, grammar_from_json_object(any_whitespace=False), ["{}"], ["{ }"])


def test_regex(matches: Matches) -> None:
    check(matches, grammar_from_regex(r"^a/\d{2,3}(é|😀)$"), ["a/12é", "a/123😀"], ["a/1é", "a/12"])
    check(matches, grammar_from_regex("a\nb|"), ["a\nb", ""], ["ab"])


def test_choice(matches: Matches) -> None:
    choices = ["a", "ab", 'q"\n\\é😀', "\x00\x7f/", "$x", "", "|"]
    check(matches, grammar_from_choice(choices), choices, ["b", "aa", "abq"])


def test_lark_and_gbnf(matches: Matches) -> None:
    check(matches, grammar_from_lark('start: "a" B+\nB: /[0-9]/'), ["a1", "a12"], ["a", "1"])
    gbnf = r"""
        root ::= "\u00e9" x-y{2} [^"\x00-\x1f] | "\\x41" # a comment
        x-y ::= "\x41" | [\u0430-\u044f] | "\x22"
    """
    check(matches, grammar_from_lark(gbnf), ["éAя.", 'é""é', "\\x41"], ["éA.", 'éAA"', "A"])


def test_text_before_a_grammar(matches: Matches) -> None:
    answer = grammar_from_choice(["yes", "no"])
    after = grammar_after_text(answer, "</think>")
    check(matches, after, ["hm</thin</think>yes", "</think>no"], ["yes", "a</think>", "</think>a"])
    token = grammar_after_text(answer, f"e{IM_START}\n", special_tokens=SPECIAL_TOKENS)
    right, wrong = [f"be me{IM_START}\nno", f"e{IM_START}\nyes"], [f"x{IM_START}\nno", "e\nno"]
    check(matches, token, right, wrong)
    tagged = grammar_from_structural_tag({"format": {"type": "grammar", "grammar": "start: /a+/"}})
    check(matches, grammar_after_text(tagged, "."), [".aa"], ["aa", "."])


# --- structural tags ---


def tag(begin: str, end: object, content: object = OBJECT) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**fields: object) -> dict:
    tags = [tag("<f=a>", "</f>"), tag("<f=b>", "</f>", {"type": "regex", "pattern": "[0-9]+"})]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **fields}


THINK = tag("<think>", "</think>", {"type": "any_text"})

FORMATS = [
    (
        {"type": "const_string", "value": "a/b"},
        ["a/b"],
        ["a", "a/bc"],
    ),
    (OBJECT, ["{}"], ["1"]),
    ({"type": "json_schema", "json_schema": True, "style": "json"}, ["{}", "1"], ["{"]),
    ({"type": "regex", "pattern": "a/\\/\n+"}, ["a//\n\n"], ["a/"]),
    ({"type": "grammar", "grammar": 'root ::= "q" r\nr ::= "z"*'}, ["q", "qzz"], ["z"]),
    ({"type": "any_text"}, ["", "a\nb"], [f"a{IM_START}"]),
    ({"type": "any_text", "excludes": ["bad", "no"]}, ["ba d"], ["a bad", "no"]),
    (
        {"type": "sequence", "elements": [THINK, {"type": "const_string", "value": "\n"}, OBJECT]},
        ["<think>a{b</think>\n{}", "<think></think>\n{}"],
        ["{}", "<think>\n{}", "<think>a</think>b\n{}"],
    ),
    (
        {"type": "sequence", "elements": [tag("(", [")", "]"], {"type": "any_text"}), THINK]},
        ["(a]<think></think>", "(a)<think>b</think>"],
        ["(a)]<think></think>", "(a"],
    ),
    (
        tag("<t>", "</t>", {"type": "any_text", "excludes": ["bad"]}),
        ["<t>good</t>"],
        ["<t>bad</t>", "<t>good"],
    ),
    (
        {"type": "or", "elements": [{"type": "const_string", "value": "x"}, THINK]},
        ["x", "<think>x</think>"],
        ["xx", ""],
    ),
    ({"type": "optional", "content": OBJECT}, ["", "{}"], ["{}{}"]),
    ({"type": "star", "content": OBJECT}, ["", "{}{}{}"], ["{}."]),
    ({"type": "plus", "content": OBJECT}, ["{}", "{}{}"], [""]),
    ({"type": "repeat", "min": 1, "max": 2, "content": OBJECT}, ["{}", "{}{}"], ["", "{}{}{}"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": OBJECT}, ["{}{}", "{}{}{}"], ["{}"]),
    (
        triggered(),
        ["", "a", "a <f=a>{}</f> b <f=b>12</f>", "<f=b>1</f>", "<f", "<f=b>1</f><f=a>{}</f>"],
        ["<f=", "<f=c>", "<f=a>1</f>", "a <f=b>1"],
    ),
    (
        triggered(at_least_one=True),
        ["<f=a>{}</f>", "<f=a>{}</f> b <f=b>12</f>."],
        ["", "a", "a<f=a>{}</f>"],
    ),
    (
        triggered(stop_after_first=True),
        ["", "a", "a<f=a>{}</f>"],
        ["a<f=a>{}</f>b", "<f=a>{}</f><f=a>{}</f>"],
    ),
    (
        triggered(stop_after_first=True, at_least_one=True),
        ["<f=a>{}</f>"],
        ["", "a<f=a>{}</f>", "<f=a>{}</f>b"],
    ),
    (triggered(excludes=["bad"]), ["good <f=b>1</f> good"], ["bad", "bad <f=b>1</f>"]),
    (
        tag("<o>", "</o>", triggered()),
        ["<o></o>", "<o>a<f=b>1</f>b</o>"],
        ["<o>a", "<o><f=</o>", "<o></o>a"],
    ),
    (
        tag("<o>", "</o>", triggered(stop_after_first=True)),
        ["<o>a</o>", "<o>a<f=b>1</f></o>"],
        ["<o>a<f=b>1</f>b</o>"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": [IM_START],
            "tags": [tag(f"{IM_START}a", f"!{IM_START}!")],
        },
        ["b", f"b{IM_START}a{{}}!{IM_START}!c"],
        [f"{IM_START}b", f"{IM_START}a{{}}"],
    ),
    (
        tag("a", f"b{IM_START}c", {"type": "any_text"}),
        [f"aab{IM_START}c", f"ab{IM_START}c"],
        ["abc", f"a{IM_START}c"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<i>", "</i>"), tag("<j>", "</j>")],
            "separator": ",",
        },
        ["", "<i>{}</i>", "<i>{}</i>,<j>{}</j>"],
        [",", "<i>{}</i>,", "<i>{}</i><j>{}</j>"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<i>", "</i>")],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<i>{}</i>"],
        ["", "<i>{}</i>,<i>{}</i>"],
    ),
]


@pytest.mark.parametrize(("format_", "right", "wrong"), FORMATS)
def test_formats(matches: Matches, format_: dict, right: list[str], wrong: list[str]) -> None:
    whole = {"type": "structural_tag", "format": format_}
    for given in (whole, json.dumps(whole)):
        grammar = grammar_from_structural_tag(given, special_tokens=SPECIAL_TOKENS)
        check(matches, grammar, right, wrong)


def test_structures(matches: Matches) -> None:
    """The older kind."""
    structures = [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}]
    grammar = grammar_from_structural_tag({"structures": structures, "triggers": ["<f="]})
    check(matches, grammar, ["a", "a<f=a>{}</f>b<f=a>{}</f>"], ["<f=b>", "<f=a>1</f>"])


def deep(levels: int) -> dict:
    spec: dict = {"type": "const_string", "value": "a"}
    for _ in range(levels):
        spec = {"type": "optional", "content": spec}
    return spec


@pytest.mark.parametrize(
    ("tag_", "words"),
    [
        ("{", "not JSON"),
        ([1], "must be an object"),
        ({}, "no field 'format'"),
        ({"format": OBJECT, "more": 1}, "'more' of the structural tag is not supported"),
        ({"format": {}}, "with a type"),
        ({"format": {"type": "token", "token": 1}}, "'token' is not supported; use const_string"),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "'max_tokens' of any_text"),
        ({"format": {"type": "const_string", "value": 1}}, "must be a string"),
        ({"format": {"type": "const_string", "value": "\ud800"}}, "not Unicode"),
        ({"format": OBJECT | {"style": "qwen_xml"}}, "style 'qwen_xml'"),
        ({"format": OBJECT | {"any_order": True}}, "any_order"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "q"}}}, "Invalid type: q"),
        ({"format": {"type": "regex", "pattern": "("}}, "unclosed group"),
        ({"format": {"type": "regex", "pattern": "a\\"}}, "not valid"),
        ({"format": {"type": "grammar", "grammar": "x"}}, "not valid"),
        ({"format": {"type": "sequence", "elements": []}}, "not empty"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, OBJECT]}}, "free text"),
        ({"format": {"type": "star", "content": {"type": "any_text"}}}, "free text"),
        ({"format": tag("a", "", {"type": "any_text"})}, "free text"),
        ({"format": tag("a", 1)}, "a tag's end"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": OBJECT}}, "from 3 to 2"),
        ({"format": {"type": "repeat", "min": True, "max": 2, "content": OBJECT}}, "integers"),
        ({"format": triggered(triggers=["<g"])}, "exactly one trigger"),
        ({"format": triggered(triggers=["<f=", "<f"])}, "exactly one trigger"),
        ({"format": triggered(triggers=["<f=", "x"])}, "no tag begins with the trigger 'x'"),
        ({"format": triggered(at_least_one=1)}, "true or false"),
        ({"structures": [], "triggers": ["a"]}, "not empty"),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}, "no field 'end'"),
        ({"format": deep(40)}, "nested deeper"),
    ],
)
def test_structural_tags_that_are_refused(tag_: dict, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_from_structural_tag(tag_, param="here")
    assert words in caught.value.message and caught.value.param == "here"


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grammar_from_json_schema("{", param="p"), "not JSON"),
        (lambda: grammar_from_json_schema("[" * 100_000, param="p"), "not JSON"),
        # Wrong types on purpose: clients send them.
        (lambda: grammar_from_json_schema([1], param="p"), "an object or true"),  # type: ignore
        (lambda: grammar_from_json_schema({"type": "x"}, param="p"), "Invalid type: x"),
        (lambda: grammar_from_json_schema({"not": {}}, param="p"), 'Unimplemented keys: ["not"]'),
        (lambda: grammar_from_json_schema({"enum": ["\ud800"]}, param="p"), "not Unicode"),
        (lambda: grammar_from_json_schema({"x-guidance": 3}, param="p"), "x-guidance"),
        (
            lambda: grammar_from_json_schema('{"a":' * 900 + "1" + "}" * 900, param="p"),
            "recursion limit",
        ),
        (lambda: grammar_from_json_object(whitespace_pattern="(", param="p"), "unclosed group"),
        (lambda: grammar_from_regex("(?=a)", param="p"), "look-around"),
        (lambda: grammar_from_regex("\ud800", param="p"), "not Unicode"),
        (lambda: grammar_from_regex(r"[^\s\S]", param="p"), "nothing matches it"),
        (lambda: grammar_from_choice([], param="p"), "at least one"),
        (lambda: grammar_from_choice(["a", 1], param="p"), "must be a string"),  # type: ignore
        (lambda: grammar_from_choice(["\ud800"], param="p"), "not Unicode"),
        (lambda: grammar_from_lark("start: a", param="p"), 'unknown name: "a"'),
        (lambda: grammar_from_lark('start: start "a"', param="p"), "nothing matches it"),
        (lambda: grammar_from_lark("root ::= a", param="p"), "Rule 'a' not found"),
        (lambda: grammar_from_lark("root ::= " + "(" * 5000, param="p"), "GBNF grammar"),
        (lambda: grammar_from_lark(r'root ::= "\ud800"', param="p"), "not a character"),
    ],
)
def test_what_is_refused(make: Callable[[], str], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert words in caught.value.message and caught.value.param == "p"
    assert caught.value.status == 400


def test_validation() -> None:
    assert validate_grammar(grammar_from_regex("a+")) is None
    assert "unknown name" in (validate_grammar("start: a") or "")
    known = grammar_from_lark(f'start: "a" {IM_END}', special_tokens={IM_END: 257})
    unknown = grammar_from_lark('start: "a" <|none|>')
    assert "special tokens" in (validate_grammar(known) or "")
    assert validate_grammar(known, TOKENIZER, VOCAB_SIZE) is None
    assert "<|none|>" in (validate_grammar(unknown, TOKENIZER, VOCAB_SIZE) or "")


def test_only_rules_name_special_tokens() -> None:
    text = f'start: A {IM_END} "{IM_END}" /{IM_END}/ // {IM_END}\nA: "a" # {IM_END}'
    grammar = json.loads(grammar_from_lark(text, special_tokens={IM_END: 257}))
    lark = grammar["grammars"][0]["lark_grammar"]
    assert lark.count("<[257]>") == 1 and lark.count(IM_END) == text.count(IM_END) - 1


def test_text_that_spells_a_special_token_is_text(ll_tokenizer: LLTokenizer) -> None:
    """The token itself would end the output."""
    text = f"a{IM_END}b"
    matcher = LLMatcher(ll_tokenizer, grammar_from_choice([text]))
    tokens = matcher.compute_ff_tokens()
    assert 257 not in tokens and bytes(tokens) == text.encode()


def test_the_vocabulary_of_grammars_is_the_models(ll_tokenizer: LLTokenizer) -> None:
    assert (ll_tokenizer.vocab_size, ll_tokenizer.eos_tokens) == (VOCAB_SIZE, [257])
