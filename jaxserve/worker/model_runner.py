"""Runs steps: keeps the device's state and programs, uploads deltas, brings tokens back."""

import queue
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Int32, Shaped

from jaxserve.messages import GrammarMask, ModelRunnerOutput, SchedulerOutput
from jaxserve.models.registry import Params
from jaxserve.worker.batch_mirror import BatchMirror, StepInput
from jaxserve.worker.buckets import Bucket, bucket_for
from jaxserve.worker.extras import StepExtras
from jaxserve.worker.extras_runner import ExtrasRunner
from jaxserve.worker.programs import EXTRA_WRITES, Programs, RunnerState
from jaxserve.worker.row_options import OptionSpec, encode_options, has_options
from jaxserve.worker.sharding import upload
from jaxserve.worker.warmup import CompileCounter


class _Forwarded(NamedTuple):
    """A step whose forward is started and whose sampling is not."""

    step_id: int
    step: StepInput
    logits: Array
    sampling_rows: Array


class _Upload(NamedTuple):
    """What a step's forward was given, for steps that repeat it."""

    step: StepInput
    bucket: Bucket
    buffer: Int32[Array, " D"] | Int32[np.ndarray, " D"]


class _InFlight(NamedTuple):
    step_id: int
    tokens: Array
    samples: np.ndarray
    extras: StepExtras | None


class ModelRunner:
    """One model on one device (mesh).

    `execute` and `sample` belong to one thread, `collect` may belong to another; steps come back in
    order.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        state: RunnerState,
        options: OptionSpec,
        max_blocks_per_row: int,
    ):
        self._programs = programs
        self._buckets = tuple(programs.forwards)
        self._params = params
        self._state = state
        self._options = options
        self._whole = state.step.table.sharding  # on every device
        self._is_on_host = all(device.platform == "cpu" for device in self._whole.device_set)
        self._num_lines = state.step.table.shape[0]
        self._mirror = BatchMirror(self._num_lines, max_blocks_per_row)
        self._extras = ExtrasRunner(programs, params, state.pooled, options.vocab_size)
        self._option_rows: set[int] = set()
        self._forwarded: _Forwarded | None = None
        self._uploaded: _Upload | None = None
        self._in_flight: queue.SimpleQueue[_InFlight] = queue.SimpleQueue()
        self._compiles = CompileCounter()

    def warm_up(self) -> None:
        """Runs each program once on nothing."""
        empty = np.zeros(0, np.int32)
        nothing = StepInput(empty, empty, empty.astype(bool), empty, empty, empty, empty)
        self._write(empty, empty)
        encoded = np.zeros(self._options.line_len + self._options.vocab_size, np.int32)
        self._write_options(0, encoded)
        forwarded = {b.num_rows: self._forward(0, nothing, b) for b in self._buckets}
        for of_rows in forwarded.values():
            for mask in (None, GrammarMask(0, [], b"")):
                self._forwarded = of_rows
                self._start_sampling(mask)
                self.collect()
            self._extras.warm_up_scores(of_rows.logits, of_rows.sampling_rows)
        self._extras.warm_up_prompts(self._state.step.hidden)

    def execute(self, plan: SchedulerOutput) -> None:
        """Starts one step; returns before it is done. What compiles here is counted.

        Where the plan awaits a mask, only the forward starts: `sample` must be called next.
        """
        assert self._forwarded is None, f"step {plan.step_id} comes before a mask"
        with self._compiles:
            step = self._mirror.apply(plan)
            self._extras.apply(plan)
            self._option_rows.difference_update(plan.released_rows)
            for admitted in plan.admitted:
                if has_options(admitted.sampling):
                    self._option_rows.add(admitted.row)
                    self._write_options(admitted.row, encode_options(admitted, self._options))
            bucket = bucket_for(self._buckets, len(step.token_ids), len(step.rows))
            step = self._write_surplus(step, bucket)
            self._forwarded = self._forward(plan.step_id, step, bucket)
            if not plan.awaits_mask:
                self._start_sampling(None)

    def sample(self, mask: GrammarMask) -> None:
        """Starts the sampling of the step that awaits `mask`."""
        assert self._forwarded is not None and self._forwarded.step_id == mask.step_id, (
            f"no step awaits the mask of step {mask.step_id}"
        )
        with self._compiles:
            self._start_sampling(mask)

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was not collected yet."""
        step_id, tokens, samples, extras = self._in_flight.get()
        sampled = np.asarray(tokens)[: len(samples)][samples]
        rows = extras.read() if extras is not None else []
        return ModelRunnerOutput(step_id, sampled.tolist(), self._compiles.count, rows)

    # --- a step's programs -----------------------------------------------------------------------

    def _forward(self, step_id: int, step: StepInput, bucket: Bucket) -> _Forwarded:
        logits, sampling_rows, state = self._programs.forwards[bucket](
            self._params, self._state.step, self._uploaded_step(step, bucket)
        )
        self._state = self._state._replace(step=state)
        return _Forwarded(step_id, step, logits, sampling_rows)

    def _uploaded_step(
        self, step: StepInput, bucket: Bucket
    ) -> Int32[Array, " D"] | Int32[np.ndarray, " D"]:
        uploaded = self._uploaded
        if uploaded is None or uploaded.bucket != bucket or not step.repeats(uploaded.step):
            buffer = np.empty(bucket.delta_len, np.int32)
            step.fill(buffer, bucket, self._num_lines)
            uploaded = _Upload(step, bucket, self._upload(buffer))
        elif isinstance(uploaded.buffer, np.ndarray):  # there will be more such steps
            uploaded = uploaded._replace(buffer=jax.device_put(uploaded.buffer, self._whole))
        self._uploaded = uploaded
        return uploaded.buffer

    def _start_sampling(self, mask: GrammarMask | None) -> None:
        assert self._forwarded is not None
        forwarded, self._forwarded = self._forwarded, None
        step, state = forwarded.step, self._state
        num_rows = forwarded.logits.shape[0]
        args = (forwarded.logits, forwarded.sampling_rows, state.step.table)
        is_plain = not self._option_rows or self._option_rows.isdisjoint(
            step.rows[step.samples].tolist()
        )
        if mask is None and is_plain:
            tokens, table = self._programs.samples[num_rows](*args)
            options = state.options
        else:
            bits = state.no_masks[num_rows]
            if mask is not None:
                bits = self._upload(mask_of_rows(mask, step.rows, *bits.shape))
            tokens, table, options = self._programs.option_samples[num_rows](
                *args, state.options, bits
            )
        self._state = state._replace(step=state.step._replace(table=table), options=options)
        if not self._is_on_host:
            tokens.copy_to_host_async()
        hidden = self._state.step.hidden
        extras = self._extras.start(step, forwarded.logits, tokens, hidden)
        self._in_flight.put(_InFlight(forwarded.step_id, tokens, step.samples, extras))

    # --- changes outside a step ------------------------------------------------------------------

    def _write_surplus(self, step: StepInput, bucket: Bucket) -> StepInput:
        """Does the writes that the bucket does not hold; returns the step with the others."""
        surplus = len(step.values) - bucket.num_writes
        if surplus <= 0:
            return step
        for start in range(0, surplus, EXTRA_WRITES):
            stop = min(start + EXTRA_WRITES, surplus)
            self._write(step.addresses[start:stop], step.values[start:stop])
        return step._replace(addresses=step.addresses[surplus:], values=step.values[surplus:])

    def _write(self, addresses: Int32[np.ndarray, " W"], values: Int32[np.ndarray, " W"]) -> None:
        padded = np.full((2, EXTRA_WRITES), np.iinfo(np.int32).max, np.int32)
        padded[0, : len(addresses)] = addresses
        padded[1, : len(values)] = values
        step = self._state.step
        table = self._programs.writes(step.table, *map(self._upload, padded))
        self._state = self._state._replace(step=step._replace(table=table))

    def _write_options(self, row: int, encoded: Int32[np.ndarray, " E"]) -> None:
        options = self._programs.option_writes(
            self._state.options, self._upload(np.array(row, np.int32)), self._upload(encoded)
        )
        self._state = self._state._replace(options=options)

    def _upload(
        self, array: Shaped[np.ndarray, "*S"]
    ) -> Shaped[Array, "*S"] | Shaped[np.ndarray, "*S"]:
        return upload(array, self._whole)


def mask_of_rows(
    mask: GrammarMask, rows: Int32[np.ndarray, " rows"], num_rows: int, num_words: int
) -> Int32[np.ndarray, "R W"]:
    """The mask by batch row: `rows` are the table lines of the first of them, ascending. Zeros for
    rows that the mask does not name."""
    bits = np.zeros((num_rows, num_words), np.int32)
    assert np.isin(mask.rows, rows).all(), f"step {mask.step_id} masks rows that do not compute"
    given = np.frombuffer(mask.bits, "<i4").reshape(len(mask.rows), num_words)
    assert given.any(axis=1).all(), f"step {mask.step_id} has a mask that allows nothing"
    bits[np.searchsorted(rows, mask.rows)] = given
    return bits
