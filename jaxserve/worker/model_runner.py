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
from jaxserve.worker.programs import EXTRA_WRITES, Programs, mask_words
from jaxserve.worker.step import DeviceState
from jaxserve.worker.warmup import CompileCounter


class _Forwarded(NamedTuple):
    """A step whose forward is started and whose sampling is not."""

    step_id: int
    logits: Array
    sampling_rows: Array
    rows: np.ndarray
    samples: np.ndarray


class _InFlight(NamedTuple):
    step_id: int
    tokens: Array
    samples: np.ndarray


class ModelRunner:
    """One model on one device (mesh).

    `execute` and `sample` belong to one thread, `collect` may belong to another; steps come back in
    order.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        state: DeviceState,
        max_blocks_per_row: int,
        device: jax.Device,
    ):
        self._programs = programs
        self._buckets = tuple(programs.forwards)
        self._params = params
        self._state = state
        self._device = device
        self._num_lines = state.table.shape[0]
        self._mirror = BatchMirror(self._num_lines, max_blocks_per_row)
        self._forwarded: _Forwarded | None = None
        self._in_flight: queue.SimpleQueue[_InFlight] = queue.SimpleQueue()
        self._compiles = CompileCounter()

    def warm_up(self) -> None:
        """Runs each program once on nothing."""
        empty = np.zeros(0, np.int32)
        nothing = StepInput(empty, empty, empty.astype(bool), empty, empty, empty)
        self._write(empty, empty)
        for bucket in self._buckets:
            forwarded = self._forward(0, nothing, bucket)
            for mask in (None, GrammarMask(0, [], b"")):
                self._forwarded = forwarded
                self._start_sampling(mask)
                self.collect()

    def execute(self, plan: SchedulerOutput) -> None:
        """Starts one step; returns before it is done. What compiles here is counted.

        Where the plan awaits a mask, only the forward starts: `sample` must be called next.
        """
        assert self._forwarded is None, f"step {plan.step_id} comes before a mask"
        with self._compiles:
            step = self._mirror.apply(plan)
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
        step_id, tokens, samples = self._in_flight.get()
        sampled = np.asarray(tokens)[: len(samples)][samples]
        return ModelRunnerOutput(step_id, sampled.tolist(), self._compiles.count)

    def _forward(self, step_id: int, step: StepInput, bucket: Bucket) -> _Forwarded:
        buffer = np.empty(bucket.delta_len, np.int32)
        step.fill(buffer, bucket, self._num_lines)
        logits, sampling_rows, self._state = self._programs.forwards[bucket](
            self._params, self._state, self._upload(buffer)
        )
        return _Forwarded(step_id, logits, sampling_rows, step.rows, step.samples)

    def _start_sampling(self, mask: GrammarMask | None) -> None:
        assert self._forwarded is not None
        step, self._forwarded = self._forwarded, None
        num_rows = step.logits.shape[0]
        args = (step.logits, step.sampling_rows, self._state.table)
        if mask is None:
            tokens, table = self._programs.samples[num_rows](*args)
        else:
            bits = mask_of_rows(mask, step.rows, *step.logits.shape)
            tokens, table = self._programs.masked_samples[num_rows](*args, self._upload(bits))
        self._state = self._state._replace(table=table)
        tokens.copy_to_host_async()
        self._in_flight.put(_InFlight(step.step_id, tokens, step.samples))

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
        """Changes the batch state outside a step."""
        padded = np.full((2, EXTRA_WRITES), np.iinfo(np.int32).max, np.int32)
        padded[0, : len(addresses)] = addresses
        padded[1, : len(values)] = values
        table = self._programs.writes(self._state.table, *map(self._upload, padded))
        self._state = self._state._replace(table=table)

    def _upload(self, array: Shaped[np.ndarray, "*S"]) -> Shaped[Array, "*S"]:
        return jax.device_put(array, self._device)


def mask_of_rows(
    mask: GrammarMask, rows: Int32[np.ndarray, " rows"], num_rows: int, vocab_size: int
) -> Int32[np.ndarray, "R W"]:
    """The mask by batch row: `rows` are the table lines of the first of them, ascending. Rows that
    the mask does not name may sample anything."""
    bits = np.full((num_rows, mask_words(vocab_size)), -1, np.int32)
    assert np.isin(mask.rows, rows).all(), f"step {mask.step_id} masks rows that do not compute"
    places = np.searchsorted(rows, mask.rows)
    bits[places] = np.frombuffer(mask.bits, "<i4").reshape(len(mask.rows), bits.shape[1])
    return bits
