"""From the body of POST /v1/responses to a chat."""

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from jaxserve.errors import RequestError
from jaxserve.server.protocol.chat import (
    AllowedTools,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    MessageToolCall,
    NamedTool,
    Tool,
    ToolChoice,
)
from jaxserve.server.protocol.common import GenerationRequest
from jaxserve.server.protocol.responses import (
    InputContent,
    InputItem,
    OutputItem,
    OutputMessage,
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
)
from jaxserve.server.protocol.structured_output import JsonSchemaFormat, ResponseFormat
from jaxserve.server.renamed_errors import renamed

INCLUDE_LOGPROBS = "message.output_text.logprobs"
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")
_TEXT_TYPES = ("input_text", "output_text", "text")
# What the chat's errors name, and the field of this body that it was made from.
_NAMES = (
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^logprobs$"), "top_logprobs"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^tool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"^(tools\[\d+\]|tool_choice(\.tools\[\d+\])?)\.function\b"), r"\1"),
)


def chat_request(
    request: ResponsesRequest, conversation: Sequence[ChatMessage]
) -> ChatCompletionRequest:
    """The chat that answers the request.

    Args:
      conversation: from `continued`.

    Raises:
      RequestError: an option is not supported, or out of range; `param` names the body's field.
    """
    _check_metadata(request.metadata or {})
    _check_reasoning(request)
    for i, name in enumerate(request.include or ()):
        if name != INCLUDE_LOGPROBS:
            raise RequestError(
                f"include[{i}]: only {INCLUDE_LOGPROBS} is supported, got {name[:100]!r}.",
                param=f"include[{i}]",
            )
    shared = {name: getattr(request, name) for name in GenerationRequest.__struct_fields__}
    has_logprobs = bool(request.include or request.top_logprobs)
    shared |= {"stream_options": None, "n": None, "max_tokens": request.max_output_tokens}
    shared |= {
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs or 0 if has_logprobs else None,
    }
    messages = list(conversation)
    if request.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    return ChatCompletionRequest(
        **shared,
        messages=messages,
        tools=_tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        structured_outputs=request.structured_outputs,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def named_as_given(error: RequestError) -> RequestError:
    """The error of a chat, with the name that the field has in this route's body."""
    return renamed(error, _NAMES)


# --- the conversation ----------------------------------------------------------------------------


def continued(
    history: Iterable[ChatMessage], given: str | Sequence[InputItem]
) -> tuple[ChatMessage, ...]:
    """The conversation with what `input` adds to it.

    A reasoning, the message and the calls that follow it are one message of the assistant.

    Raises:
      RequestError: an item is of an unknown type, or lacks something.
    """
    messages = list(history)
    if isinstance(given, str):
        messages.append(ChatMessage(role="user", content=given))
        return tuple(messages)
    for i, item in enumerate(given):
        _add_item(messages, item, f"input[{i}]")
    return tuple(messages)


def answered(
    conversation: Iterable[ChatMessage], output: Iterable[OutputItem]
) -> tuple[ChatMessage, ...]:
    """The conversation with what the model said."""
    messages = list(conversation)
    for item in output:
        if isinstance(item, OutputMessage):
            _say(messages, "".join(part.text for part in item.content))
        elif isinstance(item, ReasoningItem):
            _think(messages, "".join(part.text for part in item.content))
        else:
            _call(messages, item.call_id, item.name, item.arguments)
    return tuple(messages)


def _add_item(messages: list[ChatMessage], item: InputItem, path: str) -> None:
    match item.type or "message":
        case "message":
            _add_message(messages, item, path)
        case "reasoning":
            if item.encrypted_content is not None:
                raise RequestError(
                    f"{path}.encrypted_content cannot be read here; give content.",
                    param=f"{path}.encrypted_content",
                )
            parts = _parts(item.content or item.summary or "", f"{path}.content")
            _think(messages, parts if isinstance(parts, str) else _joined(parts))
        case "function_call":
            _call(
                messages,
                _required(item.call_id, f"{path}.call_id"),
                _required(item.name, f"{path}.name"),
                _required(item.arguments, f"{path}.arguments"),
            )
        case "function_call_output":
            message = ChatMessage(
                role="tool",
                tool_call_id=_required(item.call_id, f"{path}.call_id"),
                content=_parts(_required(item.output, f"{path}.output"), f"{path}.output") or "",
            )
            messages.append(message)
        case other:
            raise RequestError(
                f"{path}.type must be one of {', '.join(_ITEM_TYPES)}, got {other[:100]!r}.",
                param=f"{path}.type",
            )


def _add_message(messages: list[ChatMessage], item: InputItem, path: str) -> None:
    role = _required(item.role, f"{path}.role")
    if role not in _ROLES:
        raise RequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, got {role[:100]!r}.",
            param=f"{path}.role",
        )
    content = _parts(_required(item.content, f"{path}.content"), f"{path}.content")
    if role == "assistant":
        _say(messages, content or "")
    elif not content and not isinstance(content, str):
        raise RequestError(f"{path}.content must not be empty.", param=f"{path}.content")
    else:
        messages.append(ChatMessage(role=role, content=content))


def _say(messages: list[ChatMessage], content: str | list[ContentPart]) -> None:
    """Adds to the reasoning before it, if there is one."""
    last = messages[-1] if messages else None
    is_thought = last is not None and last.role == "assistant" and last.reasoning is not None
    if last is not None and is_thought and last.content is None and not last.tool_calls:
        messages[-1] = replace(last, content=content)
    else:
        messages.append(ChatMessage(role="assistant", content=content))


def _think(messages: list[ChatMessage], text: str) -> None:
    messages.append(ChatMessage(role="assistant", reasoning=text))


def _call(messages: list[ChatMessage], call_id: str, name: str, arguments: str) -> None:
    """Adds to the assistant's message before it, if there is one."""
    call = MessageToolCall(id=call_id, function=FunctionCall(name, arguments))
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        messages[-1] = replace(last, tool_calls=[*(last.tool_calls or ()), call])
    else:
        messages.append(ChatMessage(role="assistant", tool_calls=[call]))


def _parts(content: str | Sequence[InputContent], path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(content):
        if part.type == "refusal":
            refusal = _required(part.refusal, f"{path}[{i}].refusal")
            parts.append(ContentPart(type="refusal", refusal=refusal))
        elif part.type in (*_TEXT_TYPES, "reasoning_text", "summary_text"):
            text = _required(part.text, f"{path}[{i}].text")
            parts.append(ContentPart(type="text", text=text))
        else:
            raise RequestError(
                f"{path}[{i}].type: this model takes text only, got {part.type[:100]!r}.",
                param=f"{path}[{i}].type",
            )
    return parts


def _joined(parts: Iterable[ContentPart]) -> str:
    return "\n".join(part.text or part.refusal or "" for part in parts)


def _required[T](value: T | None, path: str) -> T:
    if value is None:
        raise RequestError(f"{path} is missing.", param=path)
    return value


# --- options -------------------------------------------------------------------------------------


def _check_metadata(metadata: dict[str, str]) -> None:
    is_too_long = any(
        len(key) > MAX_METADATA_KEY_LEN or len(value) > MAX_METADATA_VALUE_LEN
        for key, value in metadata.items()
    )
    if is_too_long or len(metadata) > MAX_METADATA_PAIRS:
        raise RequestError(
            f"metadata takes up to {MAX_METADATA_PAIRS} pairs, keys of up to "
            f"{MAX_METADATA_KEY_LEN} and values of up to {MAX_METADATA_VALUE_LEN} characters.",
            param="metadata",
        )


def _check_reasoning(request: ResponsesRequest) -> None:
    """Refuses what is asked of the reasoning beside its effort, and of the text its verbosity."""
    for name in ("summary", "generate_summary", "context", "mode"):
        if request.reasoning is not None and getattr(request.reasoning, name) is not None:
            raise RequestError(
                f"reasoning.{name} is not supported: the whole reasoning is in the output.",
                param=f"reasoning.{name}",
            )
    if request.text is not None and request.text.verbosity is not None:
        raise RequestError("text.verbosity is not supported.", param="text.verbosity")


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if wanted.type not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"text.format.type must be text, json_object or json_schema, got "
            f"{wanted.type[:100]!r}.",
            param="text.format.type",
        )
    if wanted.type != "json_schema":
        for name in ("name", "description", "schema", "strict"):
            if getattr(wanted, name) is not None:
                raise RequestError(
                    f"text.format.{name} does not go with type {wanted.type}.",
                    param=f"text.format.{name}",
                )
        return ResponseFormat(wanted.type)
    return ResponseFormat(wanted.type, _json_schema(wanted))


def _json_schema(wanted: TextFormat) -> JsonSchemaFormat:
    return JsonSchemaFormat(
        _required(wanted.name, "text.format.name"),
        _required(wanted.schema, "text.format.schema"),
        wanted.description,
        wanted.strict,
    )


def _tools(tools: Sequence[ResponseTool] | None) -> list[Tool] | None:
    if tools is None:
        return None
    converted = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(
                f"tools[{i}].type: only functions are supported, got {tool.type[:100]!r}.",
                param=f"tools[{i}].type",
            )
        if tool.defer_loading:
            raise RequestError(
                f"tools[{i}].defer_loading is not supported.", param=f"tools[{i}].defer_loading"
            )
        function = FunctionDefinition(
            name=_required(tool.name, f"tools[{i}].name"),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        converted.append(Tool(function=function))
    return converted


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function":
        return ToolChoice(function=FunctionName(_required(choice.name, "tool_choice.name")))
    if choice.type != "allowed_tools":
        raise RequestError(
            f"tool_choice.type must be function or allowed_tools, got {choice.type[:100]!r}.",
            param="tool_choice.type",
        )
    names = []
    for i, tool in enumerate(_required(choice.tools, "tool_choice.tools")):
        path = f"tool_choice.tools[{i}]"
        if tool.type != "function":
            raise RequestError(f"{path}.type must be function.", param=f"{path}.type")
        names.append(NamedTool(function=FunctionName(_required(tool.name, f"{path}.name"))))
    allowed = AllowedTools(mode=_required(choice.mode, "tool_choice.mode"), tools=names)
    return ToolChoice(type="allowed_tools", allowed_tools=allowed)
