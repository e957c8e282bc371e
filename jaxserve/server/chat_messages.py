"""A client's chat messages as chat templates expect them, and every check on them."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.server.protocol.chat import ChatMessage, ContentPart, MessageToolCall

_MAX_ROLE_LEN = 64


class Continuation:
    """Marks the end of the last message, to cut the rendered prompt there.

    The mark ends with a space: a template that trims messages takes that space, and is then taken
    to have trimmed the message too.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)

    def mark(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, the last one marked."""
        path = f"messages[{len(messages) - 1}].content"
        last = messages[-1]
        if not last["content"]:
            raise RequestError("continue_final_message needs a last message with text.", param=path)
        return [*messages[:-1], last | {"content": f"{last['content']}{self._mark} "}]

    def cut(self, text: str) -> str:
        """The rendered prompt up to the mark."""
        before, mark, after = text.rpartition(self._mark)
        if not mark:
            raise RequestError(
                "The chat template does not write the last message as it is, so that "
                "continue_final_message cannot go on with it.",
                param="continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages for a chat template: texts only, arguments of calls as objects.

    Raises:
      RequestError: a message is not valid; `param` is its path.
    """
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    return [_template_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    _check_fields(message, path)
    is_optional = message.role == "assistant" and (message.tool_calls or _reasoning(message))
    content = message.content
    if content is None and is_optional:
        content = ""
    rendered: dict[str, Any] = {
        "role": message.role,
        "content": content_text(content, f"{path}.content"),
    }
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    reasoning = _reasoning(message)
    if reasoning is not None:
        # Templates know it under one of these names.
        rendered |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), reasoning)
    if message.tool_calls:
        rendered["tool_calls"] = [
            _template_call(call, f"{path}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return rendered


def _reasoning(message: ChatMessage) -> str | None:
    return message.reasoning if message.reasoning is not None else message.reasoning_content


def _check_fields(message: ChatMessage, path: str) -> None:
    if not 0 < len(message.role) <= _MAX_ROLE_LEN:
        raise RequestError(
            f"{path}.role must be a name, such as user, got {message.role[:100]!r}.",
            param=f"{path}.role",
        )
    only = {
        "tool_calls": ("assistant", message.tool_calls),
        "reasoning": ("assistant", message.reasoning),
        "reasoning_content": ("assistant", message.reasoning_content),
        "tool_call_id": ("tool", message.tool_call_id),
    }
    for name, (role, value) in only.items():
        if value and message.role != role:
            raise RequestError(
                f"{path}.{name} belongs to messages of the role {role}, not "
                f"{message.role[:100]!r}.",
                param=f"{path}.{name}",
            )
    if message.reasoning and message.reasoning_content not in (None, message.reasoning):
        raise RequestError(
            f"{path}.reasoning and {path}.reasoning_content differ; give one of them.",
            param=f"{path}.reasoning_content",
        )
    if message.function_call is not None:
        raise RequestError(
            f"{path}.function_call is not supported; use tool_calls instead.",
            param=f"{path}.function_call",
        )
    for name in ("audio", "refusal"):
        if getattr(message, name) is not None:
            raise RequestError(
                f"{path}.{name} is not supported: this model takes text only.",
                param=f"{path}.{name}",
            )


def _template_call(call: MessageToolCall, path: str) -> dict[str, Any]:
    if call.type != "function":
        raise RequestError(
            f"{path}.type must be function, got {call.type[:100]!r}.", param=f"{path}.type"
        )
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = _arguments_object(arguments, f"{path}.function.arguments")
    rendered = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments or {}},
    }
    return rendered if call.id is None else {"id": call.id} | rendered


def _arguments_object(text: str, path: str) -> dict[str, Any]:
    """Templates write the arguments themselves, so they need the object."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{path} must be a JSON object, got {text[:100]!r}.", param=path)
    return value


def content_text(content: str | list[ContentPart] | None, path: str) -> str:
    """The text of a message; parts are joined by line breaks.

    Raises:
      RequestError: there is none, or a part is no text.
    """
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{path} must be a string or a list of text parts.", param=path)
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise RequestError(
                f"{path}[{i}].type: this model takes text only, got {part.type[:100]!r}.",
                param=f"{path}[{i}].type",
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise RequestError(
                f"{path}[{i}].{part.type} is missing.", param=f"{path}[{i}].{part.type}"
            )
        texts.append(text)
    return "\n".join(texts)
