"""From the pieces of an answer to the blocks of a message, and to the events that tell of them."""

import uuid
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from jaxserve.server.http import encode_json
from jaxserve.server.protocol.anthropic import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageEvent,
    OutputBlock,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

type _Kind = Literal["text", "thinking", "tool_use"]
_DELTAS = {"text": TextDelta, "thinking": ThinkingDelta, "tool_use": InputDelta}


@dataclass
class _OpenBlock:
    """The block that grows; name is a tool's."""

    kind: _Kind
    name: str = ""
    id: str = field(default_factory=lambda: f"toolu_{uuid.uuid4().hex}")
    texts: list[str] = field(default_factory=list)

    def block(self) -> OutputBlock:
        """The block so far."""
        text = "".join(self.texts)
        if self.kind == "text":
            return TextBlock(text)
        if self.kind == "thinking":
            return ThinkingBlock(text)
        return ToolUseBlock(self.id, self.name, _input(text))


def _input(text: str) -> msgspec.Raw:
    """A tool's input; what the model wrote as it is, unless that is no object."""
    if not text:
        return msgspec.Raw(b"{}")
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        is_object = False
    return msgspec.Raw(text.encode() if is_object else encode_json({"invalid_json": text}))


class BlockBuilder:
    """Takes an answer in order. A piece of another kind than the one before ends the open block.

    blocks: those that are whole.
    """

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self._open: _OpenBlock | None = None
        self._events: list[MessageEvent] = []

    def thinking(self, text: str) -> None:
        """The model thinks."""
        self._add("thinking", text)

    def text(self, text: str) -> None:
        """The model speaks."""
        self._add("text", text)

    def tool(self, name: str) -> None:
        """The use of a tool begins."""
        self._begin(_OpenBlock("tool_use", name))

    def input(self, text: str) -> None:
        """More of the input of the tool that is open."""
        assert self._open is not None and self._open.kind == "tool_use", "an input without a tool"
        self._add("tool_use", text)

    def end(self) -> None:
        """The answer is over."""
        if self._open is not None:
            self._events.append(BlockStop(len(self.blocks)))
            self.blocks.append(self._open.block())
            self._open = None

    def take_events(self) -> list[MessageEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, kind: _Kind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(_OpenBlock(kind))
        assert self._open is not None
        self._open.texts.append(text)
        self._events.append(BlockDelta(len(self.blocks), _DELTAS[kind](text)))

    def _begin(self, block: _OpenBlock) -> None:
        self.end()
        self._open = block
        self._events.append(BlockStart(len(self.blocks), block.block()))
