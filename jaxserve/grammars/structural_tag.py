"""Structural tags: text in which some parts must match a format, as clients of other servers write
them.

    {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}
    {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.grammars.pieces import (
    checked,
    json_schema_text,
    lark_any_text,
    lark_from_any,
    lark_literal,
    lark_string,
    require_unicode,
)

_MAX_DEPTH = 32


def grammar_from_structural_tag(
    tag: Mapping[str, Any] | str,
    *,
    special_tokens: Mapping[str, int] | None = None,
    param: str | None = "structured_outputs.structural_tag",
) -> str:
    """The grammar of a structural tag, which may be JSON text.

    special_tokens: the tokenizer's special tokens (name -> id), which begin, end and trigger texts
      may contain.

    Raises:
      RequestError: it is malformed, or says what a grammar cannot.
    """
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The structural tag is not JSON: {error}", param=param) from error
    builder = _Builder(special_tokens or {}, param)
    start = builder.format(_as_format(tag, builder), ends=None)
    lark = require_unicode(f"start: {start}\n" + "".join(builder.rules), param)
    grammars = [{"lark_grammar": lark}, *builder.grammars]
    return checked(json.dumps({"grammars": grammars}, ensure_ascii=False), param)


def _as_format(tag: Any, builder: "_Builder") -> Any:
    """The format of either kind of structural tag."""
    if isinstance(tag, Mapping) and "structures" in tag:
        builder.check_keys(tag, "the structural tag", required=("structures", "triggers"))
        tags = []
        for structure in builder.items(tag, "structures"):
            builder.check_keys(structure, "a structure", required=("begin", "schema", "end"))
            content = {"type": "json_schema", "json_schema": structure["schema"]}
            begin, end = structure["begin"], structure["end"]
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    builder.check_keys(tag, "the structural tag", required=("format",))
    return tag["format"]


class _Builder:
    """Lark rules of a format, made on the way through it.

    `format` and the methods behind it return a Lark expression that matches the format and then one
    of `ends`. ends: texts; () when nothing follows in particular but something may; None when the
    output ends there.
    """

    def __init__(self, special_tokens: Mapping[str, int], param: str | None):
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special_tokens = special_tokens
        self._param = param
        self._num_names = 0
        self._depth = 0
        self._makers: dict[str, Callable[[Mapping[str, Any], Sequence[str] | None], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "plus": self._repeated,
            "star": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def format(self, spec: Any, ends: Sequence[str] | None) -> str:
        """Any format."""
        if not isinstance(spec, Mapping) or not isinstance(spec.get("type"), str):
            raise self._refused(f"a format must be an object with a type, not {_short(spec)}")
        maker = self._makers.get(spec["type"])
        if maker is None:
            known = ", ".join(self._makers)
            raise self._refused(f"format type {spec['type']!r} is not supported; use {known}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._refused(f"formats are nested deeper than {_MAX_DEPTH}")
        expression = maker(spec, ends)
        self._depth -= 1
        return expression

    def check_keys(
        self, spec: Any, name: str, required: Sequence[str] = (), optional: Sequence[str] = ()
    ) -> None:
        """Refuses an object that lacks a field or has one that would be ignored."""
        if not isinstance(spec, Mapping):
            raise self._refused(f"{name} must be an object, not {_short(spec)}")
        for key in required:
            if key not in spec:
                raise self._refused(f"{name} has no field {key!r}")
        for key in spec:
            if key not in required and key not in optional and key != "type":
                raise self._refused(f"field {key!r} of {name} is not supported")

    def items(self, spec: Mapping[str, Any], key: str, type_: type = Mapping) -> list[Any]:
        """A field that is a list, not empty, of values of one type."""
        items = spec[key]
        if not isinstance(items, list) or not items:
            raise self._refused(f"{key!r} must be a list that is not empty")
        if not all(isinstance(item, type_) for item in items):
            raise self._refused(f"{key!r} must be a list of {type_.__name__.lower()} values")
        return items

    # --- one text ---

    def _const_string(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "const_string", required=("value",))
        return self._then(self._literal(self._string(spec, "value")), ends)

    def _json_schema(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "json_schema", ("json_schema",), ("style", "any_order"))
        if spec.get("style", "json") != "json":
            raise self._refused(f"json_schema style {spec['style']!r} is not supported")
        if spec.get("any_order", False) is not False:
            raise self._refused("json_schema any_order is not supported")
        schema = json_schema_text(spec["json_schema"], param=self._param)
        return self._then(self._rule("json", f"%json {schema}"), ends)

    def _regex(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "regex", required=("pattern",))
        pattern = self._string(spec, "pattern")
        name = self._new_name("regex").upper()
        self.rules.append(f"{name}: {_lark_regex(pattern)}\n")
        return self._then(name, ends)

    def _grammar(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "grammar", required=("grammar",))
        name = self._new_name("grammar")
        text = lark_from_any(self._string(spec, "grammar"), self._param)
        self.grammars.append({"name": name, "lark_grammar": text})
        return self._then(f"@{name}", ends)

    def _any_text(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "any_text", optional=("excludes",))
        excluded = self.items(spec, "excludes", str) if spec.get("excludes") else []
        return self._text_until(ends, excluded)

    # --- formats made of formats ---

    def _sequence(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "sequence", required=("elements",))
        *first, last = self.items(spec, "elements")
        parts = [self.format(element, ()) for element in first]
        return self._group(" ".join([*parts, self.format(last, ends)]))

    def _or(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        self.check_keys(spec, "or", required=("elements",))
        parts = [self.format(element, ends) for element in self.items(spec, "elements")]
        return self._group(" | ".join(parts))

    def _repeated(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        kind = spec["type"]
        self.check_keys(spec, kind, ("content",), ("min", "max") if kind == "repeat" else ())
        suffix = {"optional": "?", "plus": "+", "star": "*"}.get(kind)
        if suffix is None:
            least, most = spec.get("min"), spec.get("max")
            if type(least) is not int or type(most) is not int or not -1 <= most < 2**16:
                raise self._refused("repeat needs the integers min and max, at most 65535")
            if least < 0 or 0 <= most < least:
                raise self._refused(f"repeat from {least} to {most} times is not possible")
            suffix = f"{{{least},{most if most >= 0 else ''}}}"
        return self._then(f"({self.format(spec['content'], ())}){suffix}", ends)

    def _tag(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        begin, rest = self._tag_parts(spec, "")
        return self._then(f"{begin} {rest}", ends)

    def _tag_parts(self, spec: Mapping[str, Any], trigger: str) -> tuple[str, str]:
        """What follows `trigger` in the tag's begin, and the tag's content and end."""
        self.check_keys(spec, "tag", required=("begin", "content", "end"))
        begin = self._string(spec, "begin")
        ends = spec["end"] if isinstance(spec["end"], list) else [spec["end"]]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise self._refused("a tag's end must be a string or a list of strings")
        return self._literal(begin[len(trigger) :]), self.format(spec["content"], ends)

    def _triggered_tags(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        """Text in which a trigger must be followed by the rest of one of its tags."""
        flags = ("at_least_one", "stop_after_first", "excludes")
        self.check_keys(spec, "triggered_tags", ("triggers", "tags"), flags)
        triggers = self.items(spec, "triggers", str)
        excluded = self.items(spec, "excludes", str) if spec.get("excludes") else []
        rest_of_tags: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole_tags = []
        for tag in self.items(spec, "tags"):
            begin = tag.get("begin")
            mine = [t for t in triggers if t and isinstance(begin, str) and begin.startswith(t)]
            if len(mine) != 1:
                raise self._refused(f"the tag {_short(begin)} must begin with exactly one trigger")
            begin_rest, content = self._tag_parts(tag, mine[0])
            rest_of_tags[mine[0]].append(f"{begin_rest} {content}")
            whole_tags.append(f"{self._literal(mine[0])} {begin_rest} {content}")
        parts = []
        for trigger, rests in rest_of_tags.items():
            if not rests:
                raise self._refused(f"no tag begins with the trigger {_short(trigger)}")
            text = self._text_until([trigger], excluded)
            parts.append(f"{text} {self._group(' | '.join(rests))}")
        tag_after_text = self._group(" | ".join(parts))
        first_tag = self._group(" | ".join(whole_tags))
        text = self._text_until(ends, excluded)
        at_least_one, stop_after_first = (self._flag(spec, name) for name in flags[:2])
        if stop_after_first:
            # What follows the tag is the end itself, not text and the end.
            done = self._then("", ends)
            if at_least_one:
                return self._group(f"{first_tag} {done}")
            return self._group(f"{tag_after_text} {done} | {text}")
        return self._group(f"{first_tag if at_least_one else ''} {tag_after_text}* {text}")

    def _tags_with_separator(self, spec: Mapping[str, Any], ends: Sequence[str] | None) -> str:
        flags = ("at_least_one", "stop_after_first")
        self.check_keys(spec, "tags_with_separator", ("tags", "separator"), flags)
        tags = [self.format(tag, ()) for tag in self.items(spec, "tags")]
        at_least_one, stop_after_first = (self._flag(spec, name) for name in flags)
        tag = self._group(" | ".join(tags))
        separator = self._literal(self._string(spec, "separator"))
        tags_text = tag if stop_after_first else f"{tag} ({separator} {tag})*"
        return self._then(f"({tags_text}){'' if at_least_one else '?'}", ends)

    # --- pieces ---

    def _then(self, expression: str, ends: Sequence[str] | None) -> str:
        if not ends:
            return expression
        return self._group(f"{expression} ({' | '.join(map(self._literal, ends))})")

    def _text_until(self, ends: Sequence[str] | None, excluded: Sequence[str]) -> str:
        """Any text without the excluded ones, and then the first of `ends`."""
        if ends is None:
            name = self._new_name("text").upper()
            self.rules.append(f"{name}: /(?s:.*)/{_without(excluded)}\n")
            return name
        if not ends or "" in ends:
            raise self._refused(
                "free text (any_text, triggered_tags) can stand only at the end of the output or"
                " before the end of a tag, which must not be empty"
            )
        name = self._new_name("text")
        if excluded:
            # The end closes the text, so only what comes before it must not contain anything.
            if any(self._is_tokens(end) for end in ends):
                raise self._refused("excludes before a special token are not supported")
            texts = " | ".join(map(lark_string, ends))
            terminal = name.upper()
            self.rules.append(
                f"{name}[lazy]: {terminal}\n"
                f"{terminal}: {terminal}_BEFORE ({texts})\n"
                f"{terminal}_BEFORE: /(?s:.*)/{_without(excluded)}\n"
            )
        else:
            self.rules.append(lark_any_text(name, ends, self._special_tokens))
        return name

    def _rule(self, kind: str, body: str) -> str:
        name = self._new_name(kind)
        self.rules.append(f"{name}: {body}\n")
        return name

    def _group(self, expression: str) -> str:
        return f"({expression.strip()})"

    def _literal(self, text: str) -> str:
        return lark_literal(text, self._special_tokens)

    def _is_tokens(self, text: str) -> bool:
        return any(token in text for token in self._special_tokens)

    def _new_name(self, kind: str) -> str:
        self._num_names += 1
        return f"{kind}_{self._num_names}"

    def _string(self, spec: Mapping[str, Any], key: str) -> str:
        if not isinstance(spec[key], str):
            raise self._refused(f"{key!r} of {spec['type']} must be a string")
        return spec[key]

    def _flag(self, spec: Mapping[str, Any], key: str) -> bool:
        value = spec.get(key, False)
        if not isinstance(value, bool):
            raise self._refused(f"{key!r} must be true or false")
        return value

    def _refused(self, problem: str) -> RequestError:
        return RequestError(f"The structural tag is not valid: {problem}.", param=self._param)


def _without(excluded: Sequence[str]) -> str:
    if not excluded:
        return ""
    texts = " | ".join(map(lark_string, excluded))
    return f" & ~(/(?s:.*)/ ({texts}) /(?s:.*)/)"


def _lark_regex(pattern: str) -> str:
    """A regex between slashes."""
    escaped, is_escaped = "", False
    for char in pattern:
        escaped += "\\/" if char == "/" and not is_escaped else "\\n" if char == "\n" else char
        is_escaped = char == "\\" and not is_escaped
    return f"/{escaped}/" if escaped else '""'


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
