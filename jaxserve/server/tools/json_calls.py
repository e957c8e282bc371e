"""Reads calls that are JSON objects with a name and arguments, as most formats write them."""

from collections.abc import Callable, Sequence

from jaxserve.server.tools.format import Steps
from jaxserve.server.tools.json_text import is_json, read_json, read_json_string
from jaxserve.server.tools.output import ToolOutput
from jaxserve.server.tools.reader import Markers, Reader, Waiting
from jaxserve.server.tools.tool import FunctionTool

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")

# Whether a call by this name is taken for one.
type Accepts = Callable[[str], bool]


def any_name(name: str) -> bool:
    """For formats that mark calls: a call of an unknown function is still a call."""
    return bool(name)


class _Call:
    """Tells a call as soon as its name is known and its arguments have begun."""

    def __init__(self, r: Reader, out: ToolOutput, accepts: Accepts):
        self._r = r
        self._out = out
        self._accepts = accepts
        self._name = ""
        self._held: list[str] = []
        self.has_arguments = False

    @property
    def is_named(self) -> bool:
        return bool(self._name)

    def set_name(self, name: str | None) -> bool:
        """False when this is no function's name."""
        if not name or not self._accepts(name):
            return False
        self._name = name
        if self.has_arguments:
            self._start()
            self._out.arguments("".join(self._held))
        return True

    def begin_arguments(self) -> Callable[[str], None]:
        """Returns where their text goes."""
        self.has_arguments = True
        if not self._name:
            return self._held.append
        self._start()
        return self._out.arguments

    def _start(self) -> None:
        self._out.start(self._name)
        self._r.forget()


def read_call(
    r: Reader, out: ToolOutput, accepts: Accepts, *, needs_arguments: bool = False
) -> Waiting[bool]:
    """Reads one object. False where it stops being a call.

    The reader keeps what was read as long as nothing was told of the call. A call without
    arguments gets an empty object unless it needs them, arguments in a string are taken out of
    it, other keys are skipped.
    """
    call = _Call(r, out, accepts)
    if not (yield from r.literal("{")):
        return False
    while True:
        yield from r.whitespace()
        if not (yield from _read_member(r, call)):
            return False
        yield from r.whitespace()
        separator = yield from r.literal(",", "}")
        if separator == "}":
            break
        if not separator:
            return False
    if not call.is_named or (needs_arguments and not call.has_arguments):
        return False
    if not call.has_arguments:
        call.begin_arguments()("{}")
    return True


def _read_member(r: Reader, call: _Call) -> Waiting[bool]:
    key = yield from read_json_string(r)
    if key is None:
        return False
    yield from r.whitespace()
    if not (yield from r.literal(":")):
        return False
    yield from r.whitespace()
    if key == NAME_KEY and not call.is_named:
        return call.set_name((yield from read_json_string(r)))
    if key in ARGUMENT_KEYS and not call.has_arguments:
        return (yield from _read_arguments(r, call))
    return (yield from read_json(r, _skip))


def _read_arguments(r: Reader, call: _Call) -> Waiting[bool]:
    if not (yield from r.more()):
        return False
    first = r.text[r.pos]
    if first == "{":
        return (yield from read_json(r, call.begin_arguments()))
    if first == '"':
        text = yield from read_json_string(r)
        if text is None or not (text := text.strip()).startswith("{") or not is_json(text):
            return False
        call.begin_arguments()(text)
        return True
    if (yield from r.literal("null")):
        call.begin_arguments()("{}")
        return True
    return False


def _skip(text: str) -> None:
    pass


def read_call_list(r: Reader, out: ToolOutput, accepts: Accepts) -> Waiting[bool]:
    """Reads a list of one or more calls. False where it stops being one."""
    if not (yield from r.literal("[")):
        return False
    yield from r.whitespace()
    while True:
        if not (yield from read_call(r, out, accepts)):
            return False
        r.keep()
        yield from r.whitespace()
        separator = yield from r.literal(",", "]")
        if separator == "]":
            r.forget()
            return True
        if not separator:
            return False
        yield from r.whitespace()


def begins_with(r: Reader, start: str) -> Waiting[bool]:
    """Whether the unread text begins with this character."""
    return (yield from r.more()) and r.text[r.pos] == start


def read_named_arguments(r: Reader, out: ToolOutput, name: str | None) -> Waiting[bool]:
    """Reads the object behind a name that stood alone. False where it stops being a call."""
    if not name or not (yield from begins_with(r, "{")):
        return False
    out.start(name)
    r.forget()
    return (yield from read_json(r, out.arguments))


def give_back(r: Reader, out: ToolOutput) -> None:
    """What was read, and was no call or no part of one, is content."""
    if r.keeping:
        out.content(r.kept())


def read_end(r: Reader, out: ToolOutput, *ends: str) -> Waiting[None]:
    """After a call or what was none: reads one of the markers that end it, if it is there."""
    if r.keeping:
        give_back(r, out)
        return
    r.keep()
    yield from r.whitespace()
    if ends and (yield from r.literal(*ends)):
        r.forget()
    else:
        give_back(r, out)


def marked_calls(*starts: str, ends: tuple[str, ...] = (), may_be_bare: bool = False) -> Steps:
    """A format where a call or a list of calls stands behind a marker.

    ends: markers that may follow.  may_be_bare: a list at the very start of the answer, of calls
      of known functions, may go without.
    """
    markers = Markers(*starts)

    def steps(r: Reader, out: ToolOutput, tools: Sequence[FunctionTool]) -> Waiting[None]:
        if may_be_bare:
            names = frozenset(tool.name for tool in tools)
            r.keep()
            yield from r.whitespace()
            yield from read_call_list(r, out, names.__contains__)
            give_back(r, out)
        while marker := (yield from r.until(markers, out.content)):
            r.keep()
            r.take(r.pos + len(marker))
            yield from r.whitespace()
            if (yield from begins_with(r, "[")):
                yield from read_call_list(r, out, any_name)
            else:
                yield from read_call(r, out, any_name)
            yield from read_end(r, out, *ends)
        out.end()

    return steps
