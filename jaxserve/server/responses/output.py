"""From the pieces of an answer to the items of a response, and to the events that tell of them."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.server.protocol.logprobs import ChatTokenLogprob
from jaxserve.server.protocol.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)

type _Kind = Literal["message", "reasoning", "function_call"]
_ID_PREFIXES: dict[_Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def make_id(prefix: str) -> str:
    """A new id, such as "resp_1f0c…"."""
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass
class _OpenItem:
    """The item that grows; call_id and name are a function call's."""

    kind: _Kind
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = make_id(_ID_PREFIXES[self.kind])

    def part(self) -> OutputText | ReasoningText:
        """The content so far."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return ReasoningText(text)
        return OutputText(text=text, logprobs=list(self.logprobs))

    def item(self, status: ItemStatus, *, is_new: bool = False) -> OutputItem:
        """The item so far; `is_new`: its content has not begun."""
        if self.kind == "function_call":
            return FunctionCallItem(
                id=self.id,
                status=status,
                call_id=self.call_id,
                name=self.name,
                arguments="".join(self.texts),
            )
        part = None if is_new else self.part()
        if self.kind == "reasoning":
            thought = [part] if isinstance(part, ReasoningText) else []
            return ReasoningItem(id=self.id, status=status, content=thought)
        said = [part] if isinstance(part, OutputText) else []
        return OutputMessage(id=self.id, status=status, content=said)


class OutputBuilder:
    """Takes an answer in order. A piece of another kind than the one before ends the open item.

    items: those that are whole.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._events: list[ResponseEvent] = []
        self._sequence_number = 0

    @property
    def has_output(self) -> bool:
        """Whether there is any item."""
        return bool(self.items) or self._open is not None

    def next_number(self) -> int:
        """The number of the next event, which is taken now."""
        self._sequence_number += 1
        return self._sequence_number - 1

    def reasoning(self, text: str) -> None:
        """The model thinks."""
        item = self._continued("reasoning") or self._begin(_OpenItem("reasoning"))
        item.texts.append(text)
        event = ReasoningDelta(
            sequence_number=self.next_number(),
            item_id=item.id,
            output_index=len(self.items),
            delta=text,
        )
        self._events.append(event)

    def text(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> None:
        """The model speaks."""
        item = self._continued("message") or self._begin(_OpenItem("message"))
        item.texts.append(text)
        item.logprobs += logprobs
        event = OutputTextDelta(
            sequence_number=self.next_number(),
            item_id=item.id,
            output_index=len(self.items),
            delta=text,
            logprobs=list(logprobs),
        )
        self._events.append(event)

    def call(self, call_id: str, name: str) -> None:
        """A call begins."""
        self._begin(_OpenItem("function_call", call_id, name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that is open."""
        item = self._continued("function_call")
        assert item is not None, "arguments without a call"
        item.texts.append(text)
        event = ArgumentsDelta(
            sequence_number=self.next_number(),
            item_id=item.id,
            output_index=len(self.items),
            delta=text,
        )
        self._events.append(event)

    def end(self, status: ItemStatus) -> None:
        """The answer is over; an answer without any item is an empty message."""
        if not self.has_output:
            self._begin(_OpenItem("message"))
        self._end(status)

    def take_events(self) -> list[ResponseEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _continued(self, kind: _Kind) -> _OpenItem | None:
        return self._open if self._open is not None and self._open.kind == kind else None

    def _begin(self, item: _OpenItem) -> _OpenItem:
        self._end("completed")
        self._open = item
        index = len(self.items)
        added = ItemAdded(
            sequence_number=self.next_number(),
            output_index=index,
            item=item.item("in_progress", is_new=True),
        )
        self._events.append(added)
        if item.kind != "function_call":
            part = PartAdded(
                sequence_number=self.next_number(),
                item_id=item.id,
                output_index=index,
                part=item.part(),
            )
            self._events.append(part)
        return item

    def _end(self, status: ItemStatus) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        index = len(self.items)
        self._events += self._done_events(item, index)
        done = ItemDone(
            sequence_number=self.next_number(), output_index=index, item=item.item(status)
        )
        self._events.append(done)
        self.items.append(done.item)

    def _done_events(self, item: _OpenItem, index: int) -> list[ResponseEvent]:
        """The events that tell of all of an item's content."""
        text = "".join(item.texts)
        number = self.next_number()
        match item.kind:
            case "function_call":
                return [
                    ArgumentsDone(
                        sequence_number=number,
                        item_id=item.id,
                        output_index=index,
                        name=item.name,
                        arguments=text,
                    )
                ]
            case "reasoning":
                whole = ReasoningDone(
                    sequence_number=number, item_id=item.id, output_index=index, text=text
                )
            case "message":
                whole = OutputTextDone(
                    sequence_number=number,
                    item_id=item.id,
                    output_index=index,
                    text=text,
                    logprobs=item.logprobs,
                )
        part = PartDone(
            sequence_number=self.next_number(),
            item_id=item.id,
            output_index=index,
            part=item.part(),
        )
        return [whole, part]
