"""The flags of `jaxserve serve`: one a config field, and how their values become a config."""

import difflib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from jaxserve.config import SECTIONS, EngineConfig, replace
from jaxserve.errors import UserError

_MAX_INT = 2**63 - 1  # what the config's encoding holds


@dataclass(frozen=True)
class Flag:
    """One config field that an operator sets.

    name: the field, unique over all sections.  choices: the values of a Literal, else ().
    type: tuple is of texts, given in one or several flags, with commas between, or as JSON.
    low, high: inclusive bounds of a number.  above: an exclusive lower bound.
    """

    section: str
    name: str
    type: type
    choices: tuple[str, ...]
    default: bool | int | float | str | tuple[str, ...]
    description: str
    low: float | None = None
    high: float | None = None
    above: float | None = None

    @property
    def option(self) -> str:
        """As typed on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """Which values are valid, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.type is bool:
            return "true or false"
        if self.type is str:
            return "a text"
        if self.type is tuple:
            return "a text, or several with commas between"
        words = "a whole number" if self.type is int else "a number"
        if self.above is not None:
            words += f" above {self.above}"
        if self.low is not None and self.high is not None:
            return words + f" from {self.low} to {self.high}"
        if self.high is not None:
            return words + (" and" if self.above is not None else "") + f" up to {self.high}"
        return words if self.low is None else words + f", {self.low} or more"

    @property
    def shown_default(self) -> str:
        """The default as an operator would write it; "" where nothing is the default."""
        if isinstance(self.default, tuple):
            return ",".join(self.default)
        return str(self.default).lower() if self.type is bool else str(self.default)

    def is_valid(self, value: object) -> bool:
        """True for a value of the right type and range; a bool is not a number."""
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if isinstance(value, tuple):
            return self.type is tuple and all(type(part) is str and part for part in value)
        if type(value) is not self.type:
            return False
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        return (
            abs(value) <= _MAX_INT  # false for nan too
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def from_text(self, text: str) -> object:
        """The value of a command line's text, or the text itself where it is none."""
        try:
            return self.type(text) if self.type in (int, float) else text
        except ValueError:
            return text


def all_flags() -> list[Flag]:
    """Every field with a description, in the order of `config.py`."""
    flags = []
    for section, struct in SECTIONS.items():
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            hint = hints[field.name]
            if typing.get_origin(hint) is not typing.Annotated:
                continue
            kind, meta = typing.get_args(hint)
            choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            flag = Flag(
                section=section,
                name=field.name,
                type=str if choices else typing.get_origin(kind) or kind,
                choices=choices,
                default=field.default,
                description=meta.description,
                low=meta.ge,
                high=meta.le,
                above=meta.gt,
            )
            assert flag.type in (bool, int, float, str, tuple) and flag.is_valid(flag.default), flag
            flags.append(flag)
    return flags


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be, if any."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def config_from_flags(
    given: Mapping[str, str | bool | list[str]], config_file: str | None
) -> EngineConfig:
    """Builds the config from a command line and a YAML file; the command line wins.

    Args:
      given: by field name, what was typed; only flags that were. A list: each time it was.
      config_file: path of the YAML file, or None.

    Raises:
      UserError: a value is not valid, or the file is not.
    """
    flags = {flag.name: flag for flag in all_flags()}
    values = _read_config_file(Path(config_file), flags) if config_file is not None else {}
    for name, text in given.items():
        flag = flags[name]
        value = flag.from_text(text) if isinstance(text, str) else text
        shown = f" {flag.option} ".join(text) if isinstance(text, list) else text
        values[name] = _checked(flag, value, label=f"{flag.option} {shown}")
    return replace(EngineConfig(), **values)


def config_from_kwargs(**values: object) -> EngineConfig:
    """Builds the config from keyword arguments named as config fields.

    Raises:
      UserError: no such field, or its value is not valid.
    """
    flags = {flag.name: flag for flag in all_flags()}
    for name in values:
        if name not in flags:
            raise UserError(f"{name} is not a config field.", fix=_advice(name, flags))
    checked = {
        name: _checked(flags[name], value, label=f"{name}={value!r}", spell=lambda f: f"{f.name}=")
        for name, value in values.items()
    }
    return replace(EngineConfig(), **checked)


def _checked(
    flag: Flag, value: object, *, label: str, spell: Callable[[Flag], str] | None = None
) -> object:
    """`value`, if it is valid for `flag`; an int is taken for a float, a text or a list of texts
    for a tuple."""
    if flag.type is tuple:
        value = _texts(value)
    if value in ("", ("",)):  # such as --api-key "$UNSET"
        raise UserError(f"{label.strip()} is empty.", fix=f"Give {flag.allowed}, or leave it out.")
    if flag.type is float and type(value) is int and abs(value) <= _MAX_INT:
        value = float(value)
    if not flag.is_valid(value):
        prefix = spell(flag) if spell else f"{flag.option} "
        shown = flag.shown_default
        example = f", such as {prefix}{shown}" if shown else ""
        raise UserError(f"{label} is not valid.", fix=f"Use {flag.allowed}{example}.")
    return value


def _texts(value: object) -> object:
    """The parts of a text, or of each text of a list; `value` itself where it is neither."""
    if isinstance(value, str):
        if value.startswith("["):
            try:
                return tuple(msgspec.json.decode(value, type=list[str]))
            except msgspec.MsgspecError:
                pass  # then it is a text that begins so
        return tuple(part.strip() for part in value.split(","))
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        return value
    return tuple(text for part in value for text in typing.cast(tuple[str, ...], _texts(part)))


def _advice(name: str, names: Iterable[str]) -> str:
    match = closest(name, names)
    return f"Did you mean {match}?" if match else "'jaxserve serve --help' lists the names."


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node)).replace("-", "_")
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_config_file(path: Path, flags: Mapping[str, Flag]) -> dict[str, object]:
    """Values by field name. A key is a flag's name, with - or _ between its words."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as e:
        raise UserError(
            f"--config {path} cannot be read: {e.strerror}.", fix="Give the path of a YAML file."
        ) from None
    except RecursionError:
        raise UserError(
            f"--config {path} is nested too deeply.",
            fix="Write one 'name: value' a line, such as 'port: 8000'.",
        ) from None
    except (yaml.YAMLError, ValueError) as e:  # no UTF-8, or no such date
        mark = getattr(e, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(e, "problem", None) or " ".join(str(e).split())
        if isinstance(e, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        raise UserError(
            f"--config {path}{where} is not valid YAML: {reason}.",
            fix="Write one 'name: value' a line, such as 'port: 8000'.",
        ) from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(
            f"--config {path} is not a list of names and values.",
            fix="Write one 'name: value' a line, such as 'port: 8000'.",
        )
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            raise UserError(f"{path}: {key} is not a config field.", fix=_advice(name, flags))
        label = f"{path}: {key}: {value!r}"
        values[name] = _checked(flags[name], value, label=label, spell=lambda f: f"{f.name}: ")
    return values
