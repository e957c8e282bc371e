"""Sampling options that few requests have: their lines on the device, and what they do to logits.

A row with such options has a line of int32 and a line of token counts, written when it is admitted.
A line of zeros has no option, so rows without options read zeros. Floats are stored as their bits,
token ids as id + 1.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Int32

from jaxserve.messages import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_PROCESSOR_ARGS,
    AdmittedRow,
    SamplingParams,
)
from jaxserve.worker.logits_processors import LogitsProcessor
from jaxserve.worker.sharding import keep_whole

_NUM_RECENT = MAX_BAD_WORD_LEN - 1
_IN_PROMPT = 1 << 30  # the bit of a token's count that says the prompt has it


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """All that is static in a row's options."""

    vocab_size: int
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def mask_words(self) -> int:
        """Words of a mask with a bit a token."""
        return -(-self.vocab_size // 32)

    @property
    def line_len(self) -> int:
        """Columns of a row's line."""
        return sum(length for _, length in self._parts())

    def column(self, name: str) -> slice:
        """Where a part of the line lies."""
        start = 0
        for part, length in self._parts():
            if part == name:
                return slice(start, start + length)
            start += length
        raise AssertionError(name)

    def _parts(self) -> tuple[tuple[str, int], ...]:
        slots = MAX_LOGITS_PROCESSORS if self.processors else 0
        return (
            ("has_allowed", 1),
            ("allowed", self.mask_words),
            ("bias_ids", MAX_LOGIT_BIAS),
            ("bias_values", MAX_LOGIT_BIAS),
            ("bad_words", MAX_BAD_WORDS * MAX_BAD_WORD_LEN),
            ("recent", _NUM_RECENT),
            ("penalties", 3),
            ("processors", slots),
            ("processor_args", slots * MAX_PROCESSOR_ARGS),
        )


class OptionState(NamedTuple):
    """Options on the device, a line a table line.

    lines: as `OptionSpec` says.
    counts: how often the output has each token, plus `_IN_PROMPT` where the prompt has it; right
        for rows with penalties only.
    """

    lines: Any  # Int32[Array, "lines O"]
    counts: Any  # Int32[Array, "lines V"]


class RowOptions(NamedTuple):
    """The options of a step's rows.

    bad_words: id + 1, the last token in the last place; 0 in the places before the first.
    recent: id + 1 of the newest output tokens, the newest last; 0 where there are fewer.
    penalties: repetition (0 is off), frequency, presence.
    processors: 1 + index of the processors to apply, in order; 0 is none.
    """

    has_allowed: Int32[Array, "R 1"]
    allowed: Int32[Array, "R W"]
    bias_ids: Int32[Array, "R B"]
    bias_values: Float32[Array, "R B"]
    bad_words: Int32[Array, "R words len"]
    recent: Int32[Array, "R recent"]
    penalties: Float32[Array, "R 3"]
    processors: Int32[Array, "R P"]
    processor_args: Float32[Array, "R P args"]


def has_options(sampling: SamplingParams) -> bool:
    """Whether a request has any option that is kept here."""
    return bool(
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.logits_processors
    )


# --- on the host ---------------------------------------------------------------------------------


def encode_options(admitted: AdmittedRow, spec: OptionSpec) -> Int32[np.ndarray, " E"]:
    """A row's line and counts, one after the other."""
    sampling = admitted.sampling
    line = np.zeros(spec.line_len, np.int32)
    output = admitted.token_ids[admitted.num_prompt_tokens :]
    if sampling.allowed_token_ids is not None:
        line[spec.column("has_allowed")] = 1
        line[spec.column("allowed")] = pack_bits(sampling.allowed_token_ids, spec.vocab_size)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        line[spec.column("bias_ids")][: len(ids)] = ids
        line[spec.column("bias_values")][: len(ids)] = np.array(values, np.float32).view(np.int32)
    words = line[spec.column("bad_words")].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
    for place, word in zip(words[: len(sampling.bad_words)], sampling.bad_words, strict=True):
        place[MAX_BAD_WORD_LEN - len(word) :] = np.array(word) + 1
    recent = output[-_NUM_RECENT:]
    line[spec.column("recent")][_NUM_RECENT - len(recent) :] = np.array(recent, np.int32) + 1
    if sampling.has_penalties:
        penalties = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        line[spec.column("penalties")] = np.array(penalties, np.float32).view(np.int32)
    if sampling.logits_processors:
        _encode_processors(line, sampling, spec)
    counts = np.bincount(output, minlength=spec.vocab_size).astype(np.int32)
    counts[admitted.token_ids[: admitted.num_prompt_tokens]] |= _IN_PROMPT
    return np.concatenate([line, counts])


def _encode_processors(
    line: Int32[np.ndarray, " O"], sampling: SamplingParams, spec: OptionSpec
) -> None:
    indices = {processor.name: i for i, processor in enumerate(spec.processors)}
    wanted = sampling.logits_processors
    assert len(wanted) <= MAX_LOGITS_PROCESSORS, wanted
    line[spec.column("processors")][: len(wanted)] = [indices[name] + 1 for name, _ in wanted]
    args = line[spec.column("processor_args")].reshape(MAX_LOGITS_PROCESSORS, MAX_PROCESSOR_ARGS)
    for place, (_, values) in zip(args, wanted, strict=False):
        place[: len(values)] = np.array(values, np.float32).view(np.int32)


def pack_bits(token_ids: tuple[int, ...], vocab_size: int) -> Int32[np.ndarray, " W"]:
    """A mask of these tokens: bit i % 32 of word i // 32 is that of token i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4")


# --- on the device -------------------------------------------------------------------------------


def write_options(
    state: OptionState, row: Int32[Array, ""], encoded: Int32[Array, " E"]
) -> OptionState:
    """The state with a row's options, as `encode_options` gives them. Donate the state."""
    length = state.lines.shape[1]
    return OptionState(
        state.lines.at[row].set(encoded[:length]), state.counts.at[row].set(encoded[length:])
    )


def read_options(
    lines: Int32[Array, "lines O"], rows: Int32[Array, " R"], spec: OptionSpec
) -> RowOptions:
    """Gathers and decodes the options of `rows`; a line past the end has none."""
    gathered = lines.at[rows].get(mode="fill", fill_value=0)
    num_rows = rows.shape[0]

    def part(name: str) -> Int32[Array, "R n"]:
        return gathered[:, spec.column(name)]

    def floats(name: str) -> Float32[Array, "R n"]:
        return jax.lax.bitcast_convert_type(part(name), jnp.float32)

    return RowOptions(
        has_allowed=part("has_allowed"),
        allowed=part("allowed"),
        bias_ids=part("bias_ids"),
        bias_values=floats("bias_values"),
        bad_words=part("bad_words").reshape(num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN),
        recent=part("recent"),
        penalties=floats("penalties"),
        processors=part("processors"),
        processor_args=floats("processor_args").reshape(num_rows, -1, MAX_PROCESSOR_ARGS),
    )


def bar_by_masks(
    logits: Float32[Array, "R V"], options: RowOptions, mask: Int32[Array, "R W"], mesh: Mesh
) -> Float32[Array, "R V"]:
    """-inf for what a row's grammar mask or its allowed tokens leave out.

    A mask of zeros is none. Where mask and allowed tokens have nothing in common the mask rules.
    """
    mask = jnp.where((mask != 0).any(axis=-1, keepdims=True), mask, -1)
    both = jnp.where(options.has_allowed != 0, mask & options.allowed, mask)
    both = jnp.where((both != 0).any(axis=-1, keepdims=True), both, mask)
    num_rows, vocab_size = logits.shape
    # Halves of words: a device's share of the vocabulary may begin within a word.
    halves = (both[:, :, None] >> jnp.array([0, 16])).reshape(num_rows, -1)
    halves = keep_whole(mesh, halves[:, : -(-vocab_size // 16)])
    bits = halves[:, :, None] >> jnp.arange(16) & 1
    return jnp.where(bits.reshape(num_rows, -1)[:, :vocab_size] != 0, logits, -jnp.inf)


def bar_bad_words(logits: Float32[Array, "R V"], options: RowOptions) -> Float32[Array, "R V"]:
    """-inf for the tokens that would complete a bad word."""
    words, last = options.bad_words[:, :, :-1], options.bad_words[:, :, -1]
    matches = ((words == 0) | (words == options.recent[:, None, :])).all(axis=-1) & (last > 0)
    columns = jnp.where(matches, last - 1, logits.shape[1])
    lines = jnp.arange(logits.shape[0])[:, None]
    return logits.at[lines, columns].set(-jnp.inf, mode="drop")


def shape_logits(
    logits: Float32[Array, "R V"],
    options: RowOptions,
    counts: Int32[Array, "lines V"],
    rows: Int32[Array, " R"],
    spec: OptionSpec,
) -> Float32[Array, "R V"]:
    """Logit bias, penalties and logits processors, in this order; what is barred stays so.

    rows: the counts' line of each row; past the end where it has no options.
    """
    lines = jnp.arange(logits.shape[0])[:, None]
    logits = jax.lax.cond(
        (options.bias_values != 0).any(),
        lambda: logits.at[lines, options.bias_ids].add(options.bias_values),
        lambda: logits,
    )
    logits = jax.lax.cond(
        (options.penalties != 0).any(),
        lambda: _penalize(
            logits, options.penalties, counts.at[rows].get(mode="fill", fill_value=0)
        ),
        lambda: logits,
    )
    return _process(logits, options, spec) if spec.processors else logits


def _penalize(
    logits: Float32[Array, "R V"], penalties: Float32[Array, "R 3"], counts: Int32[Array, "R V"]
) -> Float32[Array, "R V"]:
    """Repetition, then frequency and presence penalty."""
    repetition, frequency, presence = (penalties[:, i, None] for i in range(3))
    repetition = jnp.where((repetition == 0) | (counts == 0), 1.0, repetition)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    in_output = counts & (_IN_PROMPT - 1)
    logits = logits - frequency * in_output
    return logits - presence * (in_output > 0)


def _process(
    logits: Float32[Array, "R V"], options: RowOptions, spec: OptionSpec
) -> Float32[Array, "R V"]:
    """Each row's processors in its own order."""
    is_barred = jnp.isneginf(logits)

    def apply_slot(slot: Int32[Array, ""], logits: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
        args = options.processor_args[:, slot]
        for i, processor in enumerate(spec.processors):
            uses: Bool[Array, " R"] = options.processors[:, slot] == i + 1
            logits = jax.lax.cond(
                uses.any(),
                lambda x, p=processor, uses=uses: jnp.where(
                    uses[:, None], p.function(x, args[:, : p.num_args]), x
                ),
                lambda x: x,
                logits,
            )
        return logits

    num_slots = (options.processors != 0).sum(axis=-1).max()
    processed = jax.lax.fori_loop(0, num_slots, apply_slot, logits)
    return jnp.where(is_barred, -jnp.inf, processed)


def count_tokens(
    state: OptionState,
    options: RowOptions,
    rows: Int32[Array, " R"],
    tokens: Int32[Array, " R"],
    spec: OptionSpec,
) -> OptionState:
    """The state when each of `rows` has a new token; lines past the end are dropped."""
    recent = jnp.concatenate([options.recent[:, 1:], tokens[:, None] + 1], axis=1)
    columns = spec.column("recent")
    return OptionState(
        state.lines.at[rows, columns].set(recent, mode="drop"),
        state.counts.at[rows, tokens].add(1, mode="drop"),
    )
