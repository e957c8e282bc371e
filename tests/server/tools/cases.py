"""For each format: texts, their content and their calls."""

type Case = tuple[str, str, list[tuple[str, str]]]


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

CASES: dict[str, list[Case]] = {"hermes": _HERMES, "json": _JSON}
