"""Token ids to text, a few tokens at a time, and the search for stop strings in that text."""

import codecs
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

# A character is at most 4 bytes, so this many tokens without a whole one are not text.
_MAX_HELD_TOKENS = 8
_PRIMING_TOKENS = 6
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """One sequence's text. What `feed` and `flush` returned, added up, is the whole text; every
    piece is whole characters."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come; an incomplete character becomes U+FFFD."""
        ...


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer and holds what they share."""

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        # Exactly byte-level decoding is concatenating bytes; anything else asks the tokenizer.
        self._is_byte_level = isinstance(backend.decoder, ByteLevel)
        self._table = _ByteTable(backend, self._special_ids, skip=False)
        self._table_without_special = _ByteTable(backend, self._special_ids, skip=True)
        self._pieces = self._table if self._is_byte_level else _PieceTable(backend)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token writes within a text: special tokens their name, unknown ids nothing, and
        a part of a character its bytes."""
        return self._pieces[token_id]

    def make(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A detokenizer for what follows `prompt_token_ids`.

        spaces_between_special_tokens: False takes out a space that decoding puts between two
          special tokens. Byte-level vocabularies have no such space.
        """
        if self._is_byte_level:
            return _ByteDetokenizer(
                self._table_without_special if skip_special_tokens else self._table
            )
        return _WindowDetokenizer(
            self._backend,
            self._special_ids if skip_special_tokens else frozenset(),
            prompt_token_ids[-_PRIMING_TOKENS:],
            frozenset() if spaces_between_special_tokens else self._special_ids,
        )


class _ByteTable(dict[int, bytes]):
    """Token id to its bytes, filled as ids are met; unknown ids are no bytes."""

    def __init__(self, backend: Tokenizer, special_ids: frozenset[int], *, skip: bool):
        super().__init__()
        self._backend = backend
        self._skipped_ids = special_ids if skip else frozenset()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped_ids else self._backend.id_to_token(token_id)
        if token is None:
            data = b""
        else:
            try:
                data = bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, which is stored as plain text
                data = token.encode()
        self[token_id] = data
        return data


class _PieceTable(dict[int, bytes]):
    """Token id to its bytes, for vocabularies that are not byte-level."""

    def __init__(self, backend: Tokenizer):
        super().__init__()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._bytes(token_id)
        return data

    def _bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        # The second of two has the space that a decoder takes from the start of a text.
        once, twice = (self._backend.decode([token_id] * n) for n in (1, 2))
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None and once != token:
            return bytes([int(byte[1], 16)])
        return (twice[len(once) :] if twice.startswith(once) else once).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for: printable Latin-1 bytes
    stand for themselves, the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class _ByteDetokenizer:
    """For byte-level vocabularies: equal to decoding all tokens at once, whatever the bytes."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: _ByteTable):
        self._table = table
        self._decode = _Utf8Decoder("replace").decode

    def feed(self, token_ids: Iterable[int]) -> str:
        table = self._table
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """For every other vocabulary: decodes a window of the last tokens with and without the new
    ones, since such decoders look at a token's neighbours (spaces, byte fallback).

    Equal to decoding prompt and output at once, unless the output has bytes that are no UTF-8
    directly after a character made of bytes: the whole run is then read anew by the tokenizer,
    and what has been given out cannot be taken back.
    """

    def __init__(
        self,
        backend: Tokenizer,
        skipped_ids: frozenset[int],
        prompt_tail: Sequence[int],
        unspaced_ids: frozenset[int] = frozenset(),
    ):
        self._backend = backend
        self._skipped_ids = skipped_ids
        self._unspaced_ids = unspaced_ids
        self._last_id = prompt_tail[-1] if prompt_tail else None
        self._window = [i for i in prompt_tail if i not in skipped_ids]
        self._given_text = self._decode(self._window)
        self._num_given = len(self._window)

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join([self._feed_one(i) for i in token_ids if i not in self._skipped_ids])

    def _feed_one(self, token_id: int) -> str:
        is_unspaced = token_id in self._unspaced_ids and self._last_id in self._unspaced_ids
        self._last_id = token_id
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_given
        if num_held < _MAX_HELD_TOKENS and text.endswith(_REPLACEMENT):
            return ""
        new_text = self._take(text)
        return new_text.removeprefix(" ") if is_unspaced else new_text

    def flush(self) -> str:
        if len(self._window) == self._num_given:
            return ""
        return self._take(self._decode(self._window))

    def _take(self, text: str) -> str:
        """Gives out the new part of `text`; what was held becomes the next window."""
        held = self._window[self._num_given :]
        if text.startswith(self._given_text):
            new_text = text[len(self._given_text) :]
        else:
            new_text = self._decode(held)
        self._window = held
        self._given_text = self._decode(held)
        self._num_given = len(held)
        return new_text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


class StopChecker:
    """Looks for stop strings in text that comes in pieces, and holds back what may begin one.

    Knuth, Morris and Pratt's search: time is linear in the text, whatever the strings.
    """

    __slots__ = ("_firsts", "_held", "_include", "_patterns", "_states", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool):
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        # How much of each stop string the text so far ends with.
        self._states = [0] * len(stops)
        self._held = ""
        self._include = include_in_output
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be given out. Sets `matched` when a stop string is complete: the
        text is then cut there and nothing more may be fed.

        Of several matches the one that ends first counts (of those, the longest), so that the
        result does not depend on how the text is cut into pieces.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text
        for end, char in enumerate(text, 1):
            if self._advance(char):
                text = self._held + text[:end]
                self._held = ""
                matched = self.matched or ""
                return text if self._include else text[: len(text) - len(matched)]
        text = self._held + text
        cut = len(text) - max(self._states)
        self._held = text[cut:]
        return text[:cut]

    def _advance(self, char: str) -> bool:
        """Takes one character; whether it completes a stop string."""
        for i, (stop, borders) in enumerate(self._patterns):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state]
            if stop[state] == char:
                state += 1
                if state == len(stop) and len(stop) > len(self.matched or ""):
                    self.matched = stop
            self._states[i] = state
        return self.matched is not None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


@functools.lru_cache(maxsize=128)
def _borders(stop: str) -> tuple[int, ...]:
    """For each length, the longest proper end of that much of `stop` that also begins it."""
    borders = [0, 0]
    for char in stop[1:]:
        border = borders[-1]
        while border and stop[border] != char:
            border = borders[border]
        borders.append(border + 1 if stop[border] == char else 0)
    return tuple(borders)
