"""What the operator and the checkpoint say about chats, resolved once at the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import ChatConfig
from jaxserve.errors import UserError
from jaxserve.server.reasoning import (
    REASONING_PARSERS,
    ReasoningFormat,
    detect_reasoning_parser,
)
from jaxserve.server.tools import TOOL_PARSERS, ToolFormat, detect_tool_parser


@dataclass(frozen=True)
class ChatSettings:
    """tool_parser: the name of `tool_format`, or "" when there is none."""

    tool_parser: str
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    template_kwargs: Mapping[str, Any]


def make_chat_settings(chat: ChatConfig, tokenizer: Tokenizer) -> ChatSettings:
    """Raises UserError when a flag's value is none of those it takes."""
    name = chat.tool_call_parser
    if name == "auto":
        name = detect_tool_parser(tokenizer.chat_template or "") or ""
    elif name not in TOOL_PARSERS:
        raise UserError(
            f"--tool-call-parser {name} is not known.",
            fix=f"Use auto or one of {', '.join(TOOL_PARSERS)}.",
        )
    return ChatSettings(
        tool_parser=name,
        tool_format=TOOL_PARSERS[name] if name else None,
        reasoning_format=_reasoning_format(chat.reasoning_parser, name, tokenizer),
        template_kwargs=_template_kwargs(chat.default_chat_template_kwargs, tokenizer),
    )


def _reasoning_format(name: str, tool_parser: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    if not name and tool_parser == "openai":
        name = "openai_gptoss"  # its answers cannot be read without
    if name == "auto":
        name = detect_reasoning_parser(tokenizer.chat_template or "") or ""
    if not name:
        return None
    if name not in REASONING_PARSERS:
        raise UserError(
            f"--reasoning-parser {name} is not known.",
            fix=f"Use auto or one of {', '.join(REASONING_PARSERS)}, or leave it out.",
        )
    return REASONING_PARSERS[name]


def _template_kwargs(text: str, tokenizer: Tokenizer) -> dict[str, Any]:
    if not text:
        return {}
    try:
        kwargs = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UserError(
            f"--default-chat-template-kwargs {text} is no JSON object: {error}.",
            fix="""Write it as '{"enable_thinking": false}'.""",
        ) from error
    known = tokenizer.template_names
    for name in kwargs:
        if name not in known:
            raise UserError(
                f"--default-chat-template-kwargs: no chat template of this model has a variable "
                f"{name}.",
                fix=f"Leave {name} out.",
            )
    return kwargs
