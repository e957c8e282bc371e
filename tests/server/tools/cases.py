"""For each format: texts, and what they hold: content, calls, for some formats reasoning."""

from jaxserve.server.tools.deepseek import CALLS_BEGIN

type Case = tuple[str, str, list[tuple[str, str]]] | tuple[str, str, list[tuple[str, str]], str]


def _no_calls(*texts: str) -> list[Case]:
    return [(text, text, []) for text in texts]


_HERMES: list[Case] = [
    *_no_calls("", "Hello.", " \n", "a < b, <tool> and <tool_cal"),
    (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [("now", "{}")],
    ),
    (
        'Let me see.\n\n<tool_call>{"name":"get_weather","arguments":{"city":"Zürich","days":2}}'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [("get_weather", '{"city":"Zürich","days":2}'), ("now", "{}")],
    ),
    # The keys in the other order, other keys, a name in escapes.
    (
        '<tool_call>{"id": [1, {"name": "x"}], "arguments": {"a": 1}, "name": "\\u006eow"}'
        "</tool_call> Done. ",
        " Done.",
        [("now", '{"a": 1}')],
    ),
    # Without arguments, with null, with a string that holds them.
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    (
        r'<tool_call>{"name": "now", "arguments": " {\"a\": \"\\n\"}"}</tool_call>',
        "",
        [("now", r'{"a": "\n"}')],
    ),
    # Markers, quotes, escapes and line breaks in strings; nested values.
    (
        '<tool_call>{"name": "save", "arguments": {"note": "</tool_call> \\"{[\\\\", "item": '
        '[[{}, -0.5e+3, true, false], ""]}}</tool_call>',
        "",
        [("save", '{"note": "</tool_call> \\"{[\\\\", "item": [[{}, -0.5e+3, true, false], ""]}')],
    ),
    (
        '<tool_call>{"name": "save", "arguments": {"note": "a\nb\tc\x01"}}</tool_call>',
        "",
        [("save", '{"note": "a\\nb\\tc\\u0001"}')],
    ),
    # The first arguments count.
    (
        '<tool_call>{"name": "now", "arguments": {}, "parameters": 1}</tool_call>',
        "",
        [("now", "{}")],
    ),
    # Content before and after.
    ('A\n<tool_call>{"name": "now"}</tool_call>\n\nB', "A\n\n\nB", [("now", "{}")]),
    # An unknown function is the client's to refuse.
    ('<tool_call>{"name": "no", "arguments": {}}</tool_call>', "", [("no", "{}")]),
    # Cut off: before the call is told, and behind that.
    ('<tool_call>\n{"name": "now", "arg', '<tool_call>\n{"name": "now", "arg', []),
    ('<tool_call>{"name": "now", "arguments": {"a": [1', "", [("now", '{"a": [1')]),
    ('<tool_call>{"name": "now", "arguments": {"a": 1}', "", [("now", '{"a": 1}')]),
    ('<tool_call>{"name": "now", "arguments": {}}\n</tool_', "\n</tool_", [("now", "{}")]),
    # The outer brace is forgotten.
    ('<tool_call>{"name": "now", "arguments": {}\n</tool_call>', "", [("now", "{}")]),
    # Malformed: content, and the next call is read.
    (
        '<tool_call>{name: "now"}</tool_call><tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{name: "now"}</tool_call>',
        [("now", "{}")],
    ),
    (
        '<tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        "<tool_call>",
        [("now", "{}")],
    ),
    *_no_calls(
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": }"}</tool_call>',
        "<tool_call></tool_call>",
    ),
    # It breaks off after its start was told.
    ('<tool_call>{"name": "no", "arguments": {"\\u00g', "g", [("no", '{"\\u00')]),
    (
        '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
        "1}}</tool_call>",
        [("now", '{"a": 0')],
    ),
]

_JSON: list[Case] = [
    ('[{"name": "now", "parameters": {}}]', "", [("now", "{}")]),
    (
        ' [ {"name":"get_weather","parameters":{"city":"]"}} ,\n{"parameters":{},"name":"now"} ] ',
        "",
        [("get_weather", '{"city":"]"}'), ("now", "{}")],
    ),
    *_no_calls("", "No.", '[{"name": "no", "parameters": {}}]', "[1, 2]", "[]", '[{"name": "no'),
    ('[{"name": "now", "parameters": {}}] ok', " ok", [("now", "{}")]),
    (
        '[{"name": "now", "parameters": {}}, {"name": "no"}]',
        ', {"name": "no"}]',
        [("now", "{}")],
    ),
    ('[{"name": "now", "parameters": {}}', "", [("now", "{}")]),
]


_LLAMA3: list[Case] = [
    *_no_calls(
        "",
        " Hi.\n",
        '{"name": "Bob", "parameters": {}}',
        '{"name": "now"}',
        '{"name": "now", "parameters": "x"}',
        '{"name": "now", "parameters": ',
        "{}",
        '{"a": [1, 2]}',
        'As JSON: {"name": "now", "parameters": {}}',
        "<|python_tag|>print(1)",
    ),
    ('{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    ('\n<|python_tag|>{"name": "now", "arguments": {"a": 1}}\n', "", [("now", '{"a": 1}')]),
    (
        '{"type": "function", "name": "now", "parameters": {}}; {"name": "get_weather", '
        '"parameters": {"city": "x;{}"}}\n{"name": "now", "parameters": {}}',
        "",
        [("now", "{}"), ("get_weather", '{"city": "x;{}"}'), ("now", "{}")],
    ),
    (
        '{"parameters": {"a": "b"}, "name": "now"} and {"name": "now"}',
        ' and {"name": "now"}',
        [("now", '{"a": "b"}')],
    ),
    (
        '{"name": "now", "parameters": {}}; {"name": "Bob"}',
        '; {"name": "Bob"}',
        [("now", "{}")],
    ),
    ('{"name": "now", "parameters": {"a": [', "", [("now", '{"a": [')]),
]

_PYTHONIC: list[Case] = [
    *_no_calls(
        "", "Hi.", "[1, 2]", "[]", "[no()]", "[now", "[now]", "now()", "[now ()]", "a [now()]"
    ),
    ("[now()]", "", [("now", "{}")]),
    (" [ now( ) , now()] \n", "", [("now", "{}"), ("now", "{}")]),
    (
        '<|python_start|>[get_weather(city="Zürich", days = 2,), now()]<|python_end|>',
        "",
        [("get_weather", '{"city": "Zürich", "days": 2}'), ("now", "{}")],
    ),
    (
        """[save(item={'a': [True, (1, -2.5e3,), None], "b": {}}, note='it\\'s "x"')]""",
        "",
        [("save", '{"item": {"a": [true, [1, -2.5e3], null], "b": {}}, "note": "it\'s \\"x\\""}')],
    ),
    (
        '[save(note="""a\n"b" \\u00e9\\x41\\d""", item=\'\')]',
        "",
        [("save", '{"note": "a\\n\\"b\\" éA\\\\d", "item": ""}')],
    ),
    # What is no literal ends the call where the argument begins.
    ("[now(a=1, b=f(2))] x", " b=f(2))] x", [("now", '{"a": 1')]),
    ('[now("a")]', '"a")]', [("now", "{")]),
    ("[now(a={1})]", "a={1})]", [("now", "{")]),
    # Cut off.
    ('[get_weather(city="Zür', 'city="Zür', [("get_weather", "{")]),
    ('[get_weather(city="Zürich"', 'city="Zürich"', [("get_weather", "{")]),
    ("[get_weather(days=2,", "", [("get_weather", '{"days": 2')]),
    ("[now()", "", [("now", "{}")]),
    ("[now(), no()]", ", no()]", [("now", "{}")]),
    ("[now()] Done.", "Done.", [("now", "{}")]),
]

_OLMO: list[Case] = [
    *_no_calls(
        "", "Hi.", "[now()]", "<function_calls>", "<function_calls>\nnow\n</function_calls>"
    ),
    (
        "Well.\n<function_calls>\nget_weather(city='New\nYork')\nnow()\n</function_calls> ",
        "Well.",
        [("get_weather", '{"city": "New\\nYork"}'), ("now", "{}")],
    ),
    ("<function_calls>no(a=null)", "", [("no", '{"a": null}')]),
    (
        "<function_calls>now() x</function_calls><function_calls>now()</function_calls>",
        " x</function_calls>",
        [("now", "{}"), ("now", "{}")],
    ),
]

_LIST = '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "]"}}]'
_LIST_CALLS = [("now", "{}"), ("get_weather", '{"city": "]"}')]

_MISTRAL: list[Case] = [
    *_no_calls(
        "",
        "Hi.",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]now[ARGS]",
        "[TOOL_CALLS]now[ARGS] x",
        "[TOOL_CALLS] {}",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]" + 300 * "x" + "{}",
        "[1] [TOOL",
    ),
    (f"Hm. [TOOL_CALLS] {_LIST}", "Hm.", _LIST_CALLS),
    (f"[TOOL_CALLS]{_LIST}\n", "", _LIST_CALLS),
    (f" {_LIST}", f" {_LIST}", []),
    (_LIST, "", _LIST_CALLS),
    (
        '[TOOL_CALLS]now{}[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]"}',
        "",
        [("now", "{}"), ("get_weather", '{"city": "[TOOL_CALLS]"}')],
    ),
    (
        '[TOOL_CALLS]now[CALL_ID]Ab1Cd2Ef3[ARGS]{"a": 1}[TOOL_CALLS]no{"b',
        "",
        [("now", '{"a": 1}'), ("no", '{"b')],
    ),
    ("[TOOL_CALLS][TOOL_CALLS]now{}", "[TOOL_CALLS]", [("now", "{}")]),
    ('[TOOL_CALLS]now{"a": 1}}', "}", [("now", '{"a": 1}')]),
]

_GRANITE: list[Case] = [
    *_no_calls("", "Hi.", "<|tool_call|>", "<tool_call>x", "[1]", "<|tool_call|>[]", "[no"),
    (f"<|tool_call|>{_LIST}", "", _LIST_CALLS),
    (f"Hm.\n<tool_call> {_LIST}</tool_call>", "Hm.", _LIST_CALLS),
    (f" {_LIST}\n", "", _LIST_CALLS),
    ('<|tool_call|>{"name": "no", "arguments": {}}', "", [("no", "{}")]),
    ('[{"name": "no", "arguments": {}}]', '[{"name": "no", "arguments": {}}]', []),
]

_GRANITE_20B: list[Case] = [
    *_no_calls("", "Hi.", "<function_call>", "<function_call> now()"),
    (
        '<function_call> {"name": "now", "arguments": {}}\n'
        '<function_call> {"name": "no", "arguments": {"a": 1}} ',
        "",
        [("now", "{}"), ("no", '{"a": 1}')],
    ),
]

_PHI4: list[Case] = [
    *_no_calls(
        "", "import functools\nfunctools.wraps", "functools[int]", "functools[{", "functools"
    ),
    (f"functools{_LIST}", "", _LIST_CALLS),
    (f"<|tool_call|>{_LIST}<|/tool_call|>", "", _LIST_CALLS),
    (_LIST, "", _LIST_CALLS),
]

_JAMBA: list[Case] = [
    *_no_calls("", "<tool_calls>", "<tool_calls>[]</tool_calls>"),
    (f" <tool_calls>{_LIST}</tool_calls>", "", _LIST_CALLS),
]


def _deepseek(text: str) -> str:
    """The text with its tokens written out: |sep| and the like."""
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        token = CALLS_BEGIN.replace("calls\u2581begin", name.replace("_", "\u2581"))
        text = text.replace(f"|{name}|", token)
    return text


_DEEPSEEK: list[Case] = [
    *_no_calls(
        "",
        "Hi <",
        *map(
            _deepseek,
            (
                "|calls_begin|",
                "|calls_begin|now",
                "|calls_begin||call_begin|function|sep|now\n",
                "|calls_begin||call_begin|function|sep|now\n```json\n[]\n```|call_end||calls_end|",
                "|call_begin|now|call_end|",
                "|call_begin||sep|{}",
            ),
        ),
    ),
    (
        _deepseek(
            "Ok.|calls_begin||call_begin|function|sep|get_weather\n```json\n"
            '{"city": "```"}\n```|call_end|\n'
            "|call_begin|function|sep|now\n```json\n{}\n```|call_end||calls_end|"
        ),
        "Ok.",
        [("get_weather", '{"city": "```"}'), ("now", "{}")],
    ),
    (
        _deepseek(
            "|calls_begin||call_begin|now|sep|{}|call_end|"
            '|call_begin|function|sep|{"a": 1}|call_end||calls_end|'
        ),
        "",
        [("now", "{}"), ("function", '{"a": 1}')],
    ),
    (_deepseek('|calls_begin||call_begin|now|sep|{"a": "'), "", [("now", '{"a": "')]),
    (_deepseek("|call_begin|now|sep|{} x|call_end|"), _deepseek(" x|call_end|"), [("now", "{}")]),
]

_QWEN3: list[Case] = [
    *_no_calls("", "Hi <tool", "<tool_call>", "<tool_call>\n<function=", "<function=now"),
    ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
    (
        "Ok.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
        '<parameter=days>\n3\n</parameter>\n<parameter=parts>\n[\n {"wind": true}]\n'
        "</parameter>\n</function>\n</tool_call>\n<function=now></function>",
        "Ok.",
        [
            ("get_weather", '{"city": "Zürich", "days": 3, "parts": [\n {"wind": true}]}'),
            ("now", "{}"),
        ],
    ),
    # Strings as they stand, even such that look like something else.
    (
        '<function=get_weather><parameter=city>\n\n 7 "x\\\n\n</parameter></function>',
        "",
        [("get_weather", '{"city": "\\n 7 \\"x\\\\\\n"}')],
    ),
    (
        "<function=save><parameter=note>null</parameter><parameter=item>null</parameter></function>",
        "",
        [("save", '{"note": "null", "item": null}')],
    ),
    (
        "<function=save>\n<parameter=note>\n</parameter> </function x>\n</parameter>\n</function>",
        "",
        [("save", '{"note": "</parameter> </function x>"}')],
    ),
    # Of unknown functions and parameters nothing is known.
    (
        "<function=no><parameter=a>1</parameter></function>",
        "",
        [("no", '{"a": "1"}')],
    ),
    (
        "<function=now><parameter=a>{'b': 1}</parameter><parameter=c>x</parameter></function>",
        "",
        [("now", '{"a": {"b": 1}, "c": "x"}')],
    ),
    # Cut off or broken.
    ("<function=now><parameter=a>1", "<parameter=a>1", [("now", "{")]),
    ("<function=now><parameter=a>1</parameter>\n", "", [("now", '{"a": 1')]),
    ("<function=now>\n<b>", "\n<b>", [("now", "{")]),
    ("<function=now><parameter=a\n>", "<parameter=a\n>", [("now", "{")]),
    ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
]

_ANALYSIS = "<|channel|>analysis<|message|>"
_CALL = "<|channel|>commentary to=functions."
_OPENAI: list[Case] = [
    *_no_calls(
        "", "Hi.", "<|channel|>final", "<|channel|>final" + 1100 * "x", "x to=functions.now"
    ),
    ("<|channel|>final<|message|>Hi.\n", "Hi.\n", []),
    # A header that is too long is none, but its end begins a message.
    ("<|channel|>" + 1100 * "x" + "<|message|>y", "<|channel|>" + 1100 * "x" + "y", []),
    (
        f"{_ANALYSIS}Hm\n<|end|><|start|>assistant{_ANALYSIS}Well.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.",
        [],
        "Hm\n\nWell.",
    ),
    (
        f"{_ANALYSIS}Hm<|end|><|start|>assistant{_CALL}get_weather <|constrain|>json<|message|>"
        '{"city": "<|end|>"}<|call|>',
        "",
        [("get_weather", '{"city": "<|end|>"}')],
        "Hm",
    ),
    (" to=functions.now<|channel|>commentary json<|message|>{}", "", [("now", "{}")]),
    ("<|start|>assistant to=now<|channel|>commentary<|message|> {} ", "", [("now", "{}")]),
    (
        "<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant{_CALL}now<|message|><|end|><|start|>assistant{_CALL}no<|message|>"
        '{"a": [1',
        "Let me see.",
        [("now", "{}"), ("no", '{"a": [1')],
    ),
    # A tool that is none of the client's.
    (f"{_ANALYSIS[:20]} to=python code<|message|>1 + 1<|call|>", "", [], "1 + 1"),
    ("<|channel|>commentary to=browser.open<|message|>x", "", [], "x"),
    # Malformed.
    (f"{_CALL}now<|message|>now<|call|>", f"{_CALL}now<|message|>now", []),
    (f"{_CALL}now<|message|>{{}} x<|call|>", " x", [("now", "{}")]),
    (f"{_CALL}now<|message|>{{x}}<|end|><|start|>assistant<|message|>y", "x}\ny", [("now", "{")]),
    (f"{_CALL}now<|end|>", f"{_CALL}now<|end|>", []),
    (f"{_ANALYSIS}cut", "", [], "cut"),
]

CASES: dict[str, list[Case]] = {
    "deepseek_v3": _DEEPSEEK,
    "granite": _GRANITE,
    "granite-20b-fc": _GRANITE_20B,
    "hermes": _HERMES,
    "jamba": _JAMBA,
    "json": _JSON,
    "llama3_json": _LLAMA3,
    "mistral": _MISTRAL,
    "olmo3": _OLMO,
    "openai": _OPENAI,
    "phi4_mini_json": _PHI4,
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN3,
}
