"""Feeds texts to parsers and adds up what comes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxserve.server.tools import (
    CallArguments,
    CallStart,
    ContentDelta,
    FunctionTool,
    ReasoningDelta,
    ToolFormat,
)

TOOLS = (
    FunctionTool(
        "get_weather",
        "Weather of a place",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1},
                "units": {"enum": ["c", "f"]},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"part": {"type": "object", "properties": {"wind": {"type": "boolean"}}}},
        },
    ),
    FunctionTool("now"),
    FunctionTool("save", parameters={"properties": {"item": {}, "note": {"type": "string"}}}),
)


@dataclass
class Answer:
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""


def cut(text: str, places: Iterable[int]) -> Iterator[str]:
    """The text in pieces, cut at the places."""
    start = 0
    for place in sorted(places):
        yield text[start:place]
        start = max(start, place)
    yield text[start:]


def read(tool_format: ToolFormat, pieces: Iterable[str], tools=TOOLS) -> Answer:
    """What a parser of the format finds."""
    return read_with(tool_format.make_parser(tools), pieces)


def read_with(parser, pieces: Iterable[str]) -> Answer:
    """All events added up; no piece is empty, calls are told in order, whole before the next."""
    answer = Answer()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(answer.calls)
            answer.calls.append((event.name, ""))
        else:
            assert event.text
            if isinstance(event, ContentDelta):
                answer.content += event.text
            elif isinstance(event, ReasoningDelta):
                answer.reasoning += event.text
            else:
                assert isinstance(event, CallArguments)
                assert event.index == len(answer.calls) - 1
                name, arguments = answer.calls[-1]
                answer.calls[-1] = name, arguments + event.text
    return answer
