"""Reads Python literals that arrive in pieces, and writes them as JSON."""

import json
import re

from jaxserve.server.tools.json_text import is_json, is_text
from jaxserve.server.tools.reader import Markers, Reader, Waiting

_ATOM = re.compile(r"[\w.+-]")
_MAX_ATOM_CHARS = 4096
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {
    **{c: c for c in "\\'\"/"},
    **{"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""},
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]")


def read_literal(r: Reader) -> Waiting[str | None]:
    """Reads one value and returns it as JSON; None where it stops being one.

    A value: a string, a number, True, False, None or JSON's words for them, a list, tuple or
    dictionary of values, of any depth. Tuples become lists.
    """
    parts: list[str] = []
    closers: list[str] = []
    while True:
        opener = yield from r.literal(*_CLOSERS)
        if opener:
            closers.append(_CLOSERS[opener])
            parts.append("{" if opener == "{" else "[")
            yield from r.whitespace()
            if not (yield from _close(r, parts, closers)):
                if opener == "{" and not (yield from _read_key(r, parts)):
                    return None
                continue
        elif (value := (yield from _read_scalar(r))) is None:
            return None
        else:
            parts.append(value)
        # Behind a value: the ends of what it is the last of, or another value.
        while closers:
            yield from r.whitespace()
            if (yield from _close(r, parts, closers)):
                continue
            if not (yield from r.literal(",")):
                return None
            yield from r.whitespace()
            if (yield from _close(r, parts, closers)):
                continue
            parts.append(", ")
            if closers[-1] == "}" and not (yield from _read_key(r, parts)):
                return None
            break
        else:
            return "".join(parts)


def literal_as_json(text: str) -> str | None:
    """The literal as JSON; None when the text is not one, with nothing around it."""
    r = Reader()
    r.add(text)
    r.ended = True
    try:
        next(read_literal(r))
    except StopIteration as result:
        return result.value if r.pos == len(text) else None
    raise AssertionError("waits for text after the end")


def _close(r: Reader, parts: list[str], closers: list[str]) -> Waiting[bool]:
    if not (yield from r.literal(closers[-1])):
        return False
    parts.append("}" if closers.pop() == "}" else "]")
    return True


def _read_key(r: Reader, parts: list[str]) -> Waiting[bool]:
    key = yield from _read_scalar(r)
    if key is None:
        return False
    parts.append(key if key.startswith('"') else f'"{key}"')
    yield from r.whitespace()
    if not (yield from r.literal(":")):
        return False
    parts.append(": ")
    yield from r.whitespace()
    return True


def _read_scalar(r: Reader) -> Waiting[str | None]:
    quote = yield from r.literal("'", '"', "'''", '"""')
    if quote:
        value = yield from _read_string(r, quote)
        return None if value is None else json.dumps(value, ensure_ascii=not is_text(value))
    atom = yield from r.matching(_ATOM, _MAX_ATOM_CHARS)
    if not atom:
        return None
    if atom in _WORDS:
        return _WORDS[atom]
    return _number(atom)


def _number(text: str) -> str | None:
    if not text.isascii() or text[-1] in "+-":
        return None
    if text[0] in "-0123456789" and is_json(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    if text.strip("0123456789_.eE+-"):
        return None  # inf and nan, which are no literals
    try:
        number = repr(float(text))
    except ValueError:
        return None
    return number if is_json(number) else None


def _read_string(r: Reader, quote: str) -> Waiting[str | None]:
    parts: list[str] = []
    markers = Markers(quote, "\\")
    while True:
        marker = yield from r.until(markers, parts.append)
        if not marker:
            return None
        r.take(r.pos + len(marker))
        if marker == quote:
            return "".join(parts)
        if not (yield from r.more()):
            return None
        parts.append((yield from _read_escape(r)))


def _read_escape(r: Reader) -> Waiting[str]:
    """What an escape stands for; one that is not known stands for itself."""
    kind = r.take(r.pos + 1)
    if kind in _ESCAPES:
        return _ESCAPES[kind]
    if kind in _HEX_ESCAPES:
        num_digits = _HEX_ESCAPES[kind]
        digits = ""
        while len(digits) < num_digits and (yield from r.more()) and _HEX.match(r.text[r.pos]):
            digits += r.take(r.pos + 1)
        if len(digits) == num_digits and int(digits, 16) < 0x110000:
            return chr(int(digits, 16))
        return f"\\{kind}{digits}"
    return f"\\{kind}"
