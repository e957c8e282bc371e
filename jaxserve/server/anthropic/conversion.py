"""From the body of POST /v1/messages to a chat."""

import re
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.server.http import encode_json
from jaxserve.server.protocol.anthropic import (
    InputBlock,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    Thinking,
)
from jaxserve.server.protocol.chat import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    MessageToolCall,
    Tool,
    ToolChoice,
)
from jaxserve.server.protocol.common import GenerationRequest
from jaxserve.server.protocol.structured_output import JsonSchemaFormat, ResponseFormat
from jaxserve.server.renamed_errors import renamed

_ROLES = ("user", "assistant", "system")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORT = re.compile(r"^reasoning_effort$")
# What the chat's errors name, and the field of this body that it was made from.
_NAMES = (
    (re.compile(r"^messages\b.*"), "messages"),
    (re.compile(r"^max_completion_tokens$"), "max_tokens"),
    (re.compile(r"^stop(?=\[|$)"), "stop_sequences"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
)


def chat_request(request: MessagesRequest, *, has_reasoning: bool) -> ChatCompletionRequest:
    """The chat that answers the request.

    has_reasoning: the server tells the model's reasoning from its answer.

    Raises:
      RequestError: an option is not supported, or out of range; `param` names the body's field.
    """
    shared = {name: getattr(request, name) for name in GenerationRequest.__struct_fields__}
    shared |= {"stream_options": None, "n": None, "stop": request.stop_sequences}
    choice = request.tool_choice
    messages = _messages(request)
    is_prefilled = bool(messages) and messages[-1].role == "assistant"
    if is_prefilled and messages[-1].tool_calls:
        raise RequestError("messages must not end with tool_use.", param="messages")
    output = request.output_config or OutputConfig()
    effort = output.effort
    if _is_thinking_off(request.thinking):
        if effort is not None:
            raise RequestError(
                "output_config.effort does not go with thinking that is disabled.",
                param="output_config.effort",
            )
        effort = "none" if has_reasoning else None
    return ChatCompletionRequest(
        **shared,
        messages=messages,
        tools=_tools(request.tools),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_response_format(output),
        reasoning_effort=effort,
        add_generation_prompt=False if is_prefilled else None,
        continue_final_message=True if is_prefilled else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def named_as_given(error: RequestError, request: MessagesRequest) -> RequestError:
    """The error of a chat, with the name that the field has in this route's body."""
    has_effort = request.output_config is not None and request.output_config.effort is not None
    effort = "output_config.effort" if has_effort else "thinking"
    return renamed(error, (*_NAMES, (_EFFORT, effort)))


# --- the conversation ----------------------------------------------------------------------------


def _messages(request: MessagesRequest) -> list[ChatMessage]:
    messages = []
    if request.system is not None:
        messages.append(ChatMessage(role="system", content=_texts(request.system, "system")))
    for i, message in enumerate(request.messages):
        path = f"messages[{i}]"
        if message.role not in _ROLES:
            raise RequestError(
                f"{path}.role must be one of {', '.join(_ROLES)}, got {message.role[:100]!r}.",
                param=f"{path}.role",
            )
        if isinstance(message.content, str):
            messages.append(ChatMessage(role=message.role, content=message.content))
        elif not message.content:
            raise RequestError(f"{path}.content must not be empty.", param=f"{path}.content")
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content, f"{path}.content"))
        elif message.role == "system":
            content = _texts(message.content, f"{path}.content")
            messages.append(ChatMessage(role="system", content=content))
        else:
            messages += _user_messages(message, f"{path}.content")
    return messages


def _user_messages(message: InputMessage, path: str) -> list[ChatMessage]:
    """What a user's turn holds: results of tools, each a message, and texts."""
    messages: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for i, block in enumerate(message.content):
        assert isinstance(block, InputBlock)
        if block.type != "tool_result":
            texts.append(_text_part(block, f"{path}[{i}]"))
            continue
        if texts:
            messages.append(ChatMessage(role="user", content=texts))
            texts = []
        result = _texts(block.content or "", f"{path}[{i}].content")
        if block.is_error:
            result = f"Error: {result}"
        tool_call_id = _required(block.tool_use_id, f"{path}[{i}].tool_use_id")
        messages.append(ChatMessage(role="tool", tool_call_id=tool_call_id, content=result))
    if texts:
        messages.append(ChatMessage(role="user", content=texts))
    return messages


def _assistant_message(blocks: Sequence[InputBlock], path: str) -> ChatMessage:
    thoughts, texts, calls = [], [], []
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(_required(block.thinking, f"{path}[{i}].thinking"))
        elif block.type == "tool_use":
            name = _required(block.name, f"{path}[{i}].name")
            given = _required(block.input, f"{path}[{i}].input")
            call_id = _required(block.id, f"{path}[{i}].id")
            function = FunctionCall(name, encode_json(given).decode())
            calls.append(MessageToolCall(id=call_id, function=function))
        else:
            texts.append(_text_part(block, f"{path}[{i}]").text or "")
    return ChatMessage(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        reasoning="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _texts(content: str | Sequence[InputBlock], path: str) -> str:
    """A text, or blocks of text joined by line breaks."""
    if isinstance(content, str):
        return content
    return "\n".join(
        _text_part(block, f"{path}[{i}]").text or "" for i, block in enumerate(content)
    )


def _text_part(block: InputBlock, path: str) -> ContentPart:
    if block.type != "text":
        raise RequestError(
            f"{path}.type: {block.type[:100]!r} is not supported here; this model takes text only.",
            param=f"{path}.type",
        )
    if block.citations:
        raise RequestError(f"{path}.citations is not supported.", param=f"{path}.citations")
    return ContentPart(type="text", text=_required(block.text, f"{path}.text"))


def _required[T](value: T | None, path: str) -> T:
    if value is None:
        raise RequestError(f"{path} is missing.", param=path)
    return value


# --- options -------------------------------------------------------------------------------------


def _is_thinking_off(thinking: Thinking | None) -> bool:
    if thinking is None:
        return False
    if thinking.type == "enabled":
        raise RequestError(
            "thinking.type enabled is not supported: nothing can hold the model to budget_tokens. "
            'Use {"type": "adaptive"}.',
            param="thinking.type",
        )
    if thinking.type not in ("adaptive", "disabled"):
        raise RequestError(
            f"thinking.type must be adaptive or disabled, got {thinking.type[:100]!r}.",
            param="thinking.type",
        )
    if thinking.display not in (None, "summarized"):
        raise RequestError(
            "thinking.display is not supported: the whole thinking is in the content.",
            param="thinking.display",
        )
    return thinking.type == "disabled"


def _response_format(output: OutputConfig) -> ResponseFormat | None:
    if output.format is None:
        return None
    if output.format.type != "json_schema":
        raise RequestError(
            f"output_config.format.type must be json_schema, got {output.format.type[:100]!r}.",
            param="output_config.format.type",
        )
    schema = _required(output.format.schema, "output_config.format.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat("output", schema))


def _tools(tools: Sequence[MessagesTool] | None) -> list[Tool] | None:
    if tools is None:
        return None
    converted = []
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        if tool.type not in (None, "custom"):
            raise RequestError(
                f"{path}.type: only tools that the client runs are supported, got "
                f"{tool.type[:100]!r}.",
                param=f"{path}.type",
            )
        _check_tool(tool, path)
        function = FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=_required(tool.input_schema, f"{path}.input_schema"),
            strict=tool.strict,
        )
        converted.append(Tool(function=function))
    return converted


def _check_tool(tool: MessagesTool, path: str) -> None:
    neutral: dict[str, tuple[Any, ...]] = {
        "defer_loading": (None, False),
        "input_examples": (None, []),
        "allowed_callers": (None, ["direct"]),
        "eager_input_streaming": (None, True),
    }
    for name, values in neutral.items():
        if getattr(tool, name) not in values:
            raise RequestError(f"{path}.{name} is not supported.", param=f"{path}.{name}")


def _tool_choice(choice: MessagesToolChoice | None) -> str | ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return ToolChoice(function=FunctionName(_required(choice.name, "tool_choice.name")))
    if choice.type not in _TOOL_CHOICES:
        raise RequestError(
            f"tool_choice.type must be auto, any, tool or none, got {choice.type[:100]!r}.",
            param="tool_choice.type",
        )
    return _TOOL_CHOICES[choice.type]
