"""Text that arrives in pieces, for parsers written as generators that yield to wait for more."""

import re
from collections.abc import Callable, Generator

# Yields to wait for more text; the reader may have been ended when it goes on.
type Waiting[T] = Generator[None, None, T]

WHITESPACE = " \t\r\n"
# Of a function or an argument, where its text has no quotes.
MAX_NAME_CHARS = 256
_NO_WHITESPACE = re.compile(r"[^ \t\r\n]")


class Reader:
    """The unread text. What was read since `keep()` can be had back, for text that was no call.

    keeping: whether it is kept.

    Reading to the end takes time linear in the text, however it is cut.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.keeping = False
        self._kept: list[str] = []
        self._keep_from = 0

    def add(self, text: str) -> None:
        """More text has come."""
        if self.keeping:
            self._kept.append(self.text[self._keep_from : self.pos])
            self._keep_from = 0
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def keep(self) -> None:
        """From here on, what is read is kept."""
        self.keeping = True
        self._kept.clear()
        self._keep_from = self.pos

    def forget(self) -> None:
        """What was kept is not needed any more."""
        self.keeping = False
        self._kept.clear()

    def kept(self) -> str:
        """What was read since `keep()`, which is forgotten now."""
        assert self.keeping
        kept = "".join(self._kept) + self.text[self._keep_from : self.pos]
        self.forget()
        return kept

    def take(self, end: int) -> str:
        """Reads up to the position `end`."""
        taken = self.text[self.pos : end]
        self.pos = end
        return taken

    def more(self) -> Waiting[bool]:
        """Waits until there is an unread character; False at the end of the text."""
        while self.pos == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def whitespace(self) -> Waiting[str]:
        """Reads JSON's whitespace."""
        parts = []
        while (yield from self.more()):
            other = _NO_WHITESPACE.search(self.text, self.pos)
            parts.append(self.take(other.start() if other else len(self.text)))
            if other:
                break
        return "".join(parts)

    def literal(self, *literals: str) -> Waiting[str]:
        """Reads one of the literals, the longest that fits; "" where the text has none of them."""
        found = yield from self.peek(*literals)
        self.pos += len(found)
        return found

    def peek(self, *literals: str) -> Waiting[str]:
        """The same, but it stays unread."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, literals))]
            longer = [s for s in literals if len(s) > len(rest) and s.startswith(rest)]
            if longer and not self.ended:
                yield
                continue
            return max((s for s in literals if rest.startswith(s)), key=len, default="")

    def matching(self, pattern: re.Pattern[str], max_chars: int) -> Waiting[str | None]:
        """Reads as long as the pattern of one character fits; None where that is too long."""
        taken = ""
        while (yield from self.more()):
            start = self.pos
            while self.pos < len(self.text) and pattern.match(self.text[self.pos]):
                self.pos += 1
                if len(taken) + self.pos - start > max_chars:
                    return None
            taken += self.text[start : self.pos]
            if self.pos < len(self.text):
                break
        return taken

    def until(self, markers: "Markers", sink: Callable[[str], None]) -> Waiting[str]:
        """Gives the text to `sink` as it comes, up to a marker, which stays unread; "": none."""
        while True:
            end, marker = markers.search(self.text, self.pos, at_end=self.ended)
            if end > self.pos:
                sink(self.take(end))
            if marker or self.ended:
                return marker
            yield

    def rest(self, sink: Callable[[str], None]) -> Waiting[None]:
        """Gives all that comes to `sink`."""
        while (yield from self.more()):
            sink(self.take(len(self.text)))


class Markers:
    """Finds the first of several markers, also one that is not complete yet."""

    def __init__(self, *markers: str):
        self._markers = markers
        self._first = re.compile("[" + "".join(re.escape(m[0]) for m in markers) + "]")

    def search(self, text: str, pos: int, *, at_end: bool) -> tuple[int, str]:
        """The end of the text that surely precedes any marker, and the marker there or ""."""
        while candidate := self._first.search(text, pos):
            pos = candidate.start()
            for marker in self._markers:
                if text.startswith(marker, pos):
                    return pos, marker
            if not at_end:
                rest = text[pos : pos + max(map(len, self._markers))]
                if any(marker.startswith(rest) for marker in self._markers):
                    return pos, ""
            pos += 1
        return len(text), ""


class GeneratorParser[E]:
    """Runs a generator over the pieces of a text. events: where the generator leaves its events."""

    def __init__(
        self,
        reader: Reader,
        events: list[E],
        steps: Waiting[None],
        merge: Callable[[list[E]], list[E]],
    ):
        self._reader = reader
        self._events = events
        self._steps = steps
        self._merge = merge

    def feed(self, text: str) -> list[E]:
        """What the text so far says for sure."""
        assert not self._reader.ended
        self._reader.add(text)
        next(self._steps)
        return self._taken()

    def finish(self) -> list[E]:
        """The rest, at the end of the text."""
        self._reader.ended = True
        for _ in self._steps:
            raise AssertionError("the parser waits for text after the end")
        return self._taken()

    def _taken(self) -> list[E]:
        if not self._events:
            return []
        taken = self._merge(self._events)
        self._events.clear()
        return taken
