"""What `tools`, `tool_choice` and `parallel_tool_calls` of a chat come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.errors import RequestError
from jaxserve.server.protocol.chat import ChatCompletionRequest, NamedTool, Tool
from jaxserve.server.tools import FunctionTool

MAX_TOOLS = 1024
MAX_TOOL_NAME_LEN = 256

type ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolPlan:
    """tools: those that may be called; empty for "none".

    indices: of each in the request.
    must_call: the answer is calls and nothing else.
    is_parallel: there may be several.
    strict: indices of tools whose arguments must be valid in any case.
    """

    mode: ToolMode
    tools: tuple[FunctionTool, ...] = ()
    indices: tuple[int, ...] = ()
    is_parallel: bool = True
    strict: tuple[int, ...] = ()

    @property
    def must_call(self) -> bool:
        return self.mode in ("required", "named")

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates expect them."""
        if not self.tools:
            return None
        return [{"type": "function", "function": _described(tool)} for tool in self.tools]


def _described(tool: FunctionTool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        described["description"] = tool.description
    # Some templates look into the parameters of every tool.
    described["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return described


def plan_tools(request: ChatCompletionRequest) -> ToolPlan:
    """Raises RequestError when an option is not valid; `param` is its path."""
    given = _checked_tools(request.tools or [])
    mode, names = _choice(request, given)
    if mode == "none":
        return ToolPlan("none")
    indices = tuple(i for i, tool in enumerate(given) if names is None or tool.name in names)
    return ToolPlan(
        mode,
        tools=tuple(given[i] for i in indices),
        indices=indices,
        is_parallel=mode != "named" and request.parallel_tool_calls is not False,
        strict=tuple(i for i in indices if _is_strict((request.tools or [])[i])),
    )


def _is_strict(tool: Tool) -> bool:
    return tool.function is not None and bool(tool.function.strict)


def _checked_tools(tools: Sequence[Tool]) -> list[FunctionTool]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools takes up to {MAX_TOOLS}, got {len(tools)}.", param="tools")
    checked: list[FunctionTool] = []
    names: set[str] = set()
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        if tool.type != "function":
            raise RequestError(
                f"{path}.type: only functions are supported, got {tool.type[:100]!r}.",
                param=f"{path}.type",
            )
        function = tool.function
        if function is None:
            raise RequestError(f"{path}.function is missing.", param=f"{path}.function")
        name_path = f"{path}.function.name"
        if not 0 < len(function.name) <= MAX_TOOL_NAME_LEN or not function.name.isprintable():
            raise RequestError(
                f"{name_path} must be 1 to {MAX_TOOL_NAME_LEN} printable characters.",
                param=name_path,
            )
        if function.name in names:
            raise RequestError(
                f"{name_path}: there is another tool {function.name!r}.", param=name_path
            )
        names.add(function.name)
        _check_takes_object(function.parameters, f"{path}.function.parameters")
        checked.append(FunctionTool(function.name, function.description, function.parameters))
    return checked


def _check_takes_object(schema: Mapping[str, Any] | None, path: str) -> None:
    """Arguments are objects, so a schema of anything else could not be kept."""
    kind = (schema or {}).get("type")
    if kind is not None and "object" not in (kind if isinstance(kind, list) else [kind]):
        raise RequestError(
            f"{path}.type must be object: arguments are objects.", param=f"{path}.type"
        )


def _choice(
    request: ChatCompletionRequest, tools: Sequence[FunctionTool]
) -> tuple[ToolMode, frozenset[str] | None]:
    """The mode, and the names of the tools that may be called, if not all may."""
    choice = request.tool_choice
    if choice is None:
        return ("auto" if tools else "none"), None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice must be none, auto, required or an object, got {choice[:100]!r}.",
                param="tool_choice",
            )
        if tools or choice == "required":
            _check_there_are(tools)
            return choice, None
        return "none", None
    if choice.type == "function":
        if choice.function is None:
            raise RequestError("tool_choice.function is missing.", param="tool_choice.function")
        _check_known(choice.function.name, tools, "tool_choice.function.name")
        return "named", frozenset((choice.function.name,))
    if choice.type != "allowed_tools":
        raise RequestError(
            f"tool_choice.type must be function or allowed_tools, got {choice.type[:100]!r}.",
            param="tool_choice.type",
        )
    allowed = choice.allowed_tools
    path = "tool_choice.allowed_tools"
    if allowed is None:
        raise RequestError(f"{path} is missing.", param=path)
    if allowed.mode not in ("auto", "required"):
        raise RequestError(f"{path}.mode must be auto or required.", param=f"{path}.mode")
    if not allowed.tools:
        raise RequestError(f"{path}.tools must not be empty.", param=f"{path}.tools")
    names = [
        _allowed_name(tool, tools, f"{path}.tools[{i}]") for i, tool in enumerate(allowed.tools)
    ]
    return allowed.mode, frozenset(names)


def _allowed_name(tool: NamedTool, tools: Sequence[FunctionTool], path: str) -> str:
    if tool.type != "function" or tool.function is None:
        raise RequestError(f"{path} must name a function.", param=path)
    _check_known(tool.function.name, tools, f"{path}.function.name")
    return tool.function.name


def _check_known(name: str, tools: Sequence[FunctionTool], path: str) -> None:
    _check_there_are(tools)
    if all(tool.name != name for tool in tools):
        raise RequestError(f"{path}: there is no tool {name[:100]!r}.", param=path)


def _check_there_are(tools: Sequence[FunctionTool]) -> None:
    if not tools:
        raise RequestError("tool_choice is only allowed with tools.", param="tool_choice")
