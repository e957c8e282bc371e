"""Reads JSON values that arrive in pieces, of any depth."""

import json
import re
from collections.abc import Callable

from jaxserve.server.tools.reader import WHITESPACE, Reader, Waiting

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_DIGITS = "0123456789"
_NUMBER = {
    "-": {"0": "0", **dict.fromkeys("123456789", "1")},
    "0": {".": ".", "e": "e", "E": "e"},
    "1": {".": ".", "e": "e", "E": "e", **dict.fromkeys(_DIGITS, "1")},
    ".": dict.fromkeys(_DIGITS, ".1"),
    ".1": {"e": "e", "E": "e", **dict.fromkeys(_DIGITS, ".1")},
    "e": {"+": "e+", "-": "e+", **dict.fromkeys(_DIGITS, "e1")},
    "e+": dict.fromkeys(_DIGITS, "e1"),
    "e1": dict.fromkeys(_DIGITS, "e1"),
}
_NUMBER_START = {"-": "-", "0": "0", **dict.fromkeys("123456789", "1")}
_NUMBER_END = frozenset(("0", "1", ".1", "e1"))
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Follows one JSON value. done: it is complete. failed: what came is no JSON."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._state = "value"
        self._stack: list[str] = []
        self._is_key = False
        self._rest = ""  # of true, false, null
        self._num_hex = 0

    def scan(self, text: str, pos: int) -> int:
        """The end of what belongs to the value, from `pos` on.

        That is the end of the text unless the value is done or has failed, or the character there
        is a control character in a string, which JSON does not allow; one may go on behind it.
        """
        while pos < len(text) and not self.done:
            state = self._state
            if state == "string":
                pos = _PLAIN.match(text, pos).end()  # pyright: ignore[reportOptionalMemberAccess]
                if pos == len(text) or text[pos] < " ":
                    return pos
                self._string(text[pos])
            elif state in _NUMBER:
                following = _NUMBER[state].get(text[pos])
                if following is not None:
                    self._state = following
                elif state in _NUMBER_END:
                    self._end_value()
                    continue
                else:
                    self.failed = True
            elif text[pos] in WHITESPACE and state in _BETWEEN:
                pass
            else:
                self.failed = not _STEPS[state](self, text[pos])
            if self.failed:
                return pos
            pos += 1
        return pos

    def _string(self, char: str) -> None:
        if char == "\\":
            self._state = "escape"
        elif self._is_key:
            self._is_key = False
            self._state = "colon"
        else:
            self._end_value()

    def _escape(self, char: str) -> bool:
        self._state = "hex" if char == "u" else "string"
        self._num_hex = 0
        return char in '"\\/bfnrtu'

    def _hex(self, char: str) -> bool:
        self._num_hex += 1
        if self._num_hex == 4:
            self._state = "string"
        return char in _HEX

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first item"
        elif char == '"':
            self._state = "string"
        elif char in _NUMBER_START:
            self._state = _NUMBER_START[char]
        elif char in _LITERALS:
            self._state = "literal"
            self._rest = _LITERALS[char][1:]
        else:
            return False
        return True

    def _literal(self, char: str) -> bool:
        fits = char == self._rest[0]
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return fits

    def _first_item(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        self._state = "string"
        self._is_key = True
        return char == '"'

    def _colon(self, char: str) -> bool:
        self._state = "value"
        return char == ":"

    def _after(self, char: str) -> bool:
        if char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
            return True
        return self._close(char)

    def _close(self, char: str) -> bool:
        fits = self._stack.pop() + char in ("{}", "[]")
        self._end_value()
        return fits

    def _end_value(self) -> None:
        self._state = "after"
        self.done = not self._stack


_STEPS: dict[str, Callable[[JsonScanner, str], bool]] = {
    "value": JsonScanner._value,
    "first item": JsonScanner._first_item,
    "first key": JsonScanner._first_key,
    "key": JsonScanner._key,
    "colon": JsonScanner._colon,
    "after": JsonScanner._after,
    "escape": JsonScanner._escape,
    "hex": JsonScanner._hex,
    "literal": JsonScanner._literal,
}
# Where whitespace may stand.
_BETWEEN = frozenset(("value", "first item", "first key", "key", "colon", "after"))


def read_json(r: Reader, sink: Callable[[str], None]) -> Waiting[bool]:
    """Reads one value and gives it to `sink` as it comes; False where it stops being JSON.

    Control characters in strings, which models write, are given escaped. A number needs something
    behind it.
    """
    scanner = JsonScanner()
    while True:
        end = scanner.scan(r.text, r.pos)
        if end > r.pos:
            sink(r.take(end))
        if scanner.done or scanner.failed:
            return scanner.done and not scanner.failed
        if r.pos < len(r.text):
            sink(json.dumps(r.take(r.pos + 1))[1:-1])
        elif r.ended:
            return False
        else:
            yield


def read_json_string(r: Reader) -> Waiting[str | None]:
    """Reads a string; None where the text has none, or one that is no text (half a surrogate)."""
    if not (yield from r.more()) or r.text[r.pos] != '"':
        return None
    parts: list[str] = []
    if not (yield from read_json(r, parts.append)):
        return None
    value = json.loads("".join(parts))
    return value if is_text(value) else None


def is_text(value: str) -> bool:
    """Whether the string can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json(text: str) -> bool:
    """Whether the text is one value, with nothing around it."""
    if text[:1] in WHITESPACE:
        return False
    scanner = JsonScanner()
    end = scanner.scan(text + " ", 0)
    return scanner.done and not scanner.failed and end == len(text)
