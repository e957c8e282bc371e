"""Runs steps: keeps the device's state and programs, uploads deltas, brings tokens back."""

import queue
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from jaxserve.messages import ModelRunnerOutput, SchedulerOutput
from jaxserve.models.registry import Params
from jaxserve.worker.batch_mirror import BatchMirror, StepInput
from jaxserve.worker.batch_state import num_columns
from jaxserve.worker.buckets import Bucket, bucket_for
from jaxserve.worker.step import DeviceState, StepSpec
from jaxserve.worker.warmup import CompileCounter
from pallas_kernels.ragged_paged_attention import KVCache

EXTRA_WRITES = 4096  # writes that one extra upload carries


class Programs(NamedTuple):
    """The compiled programs; `steps` has one a bucket."""

    steps: dict[Bucket, jax.stages.Compiled]
    writes: jax.stages.Compiled


class _InFlight(NamedTuple):
    step_id: int
    tokens: Array
    samples: np.ndarray


def state_shapes(
    spec: StepSpec, max_num_seqs: int, max_blocks_per_row: int, num_blocks: int
) -> DeviceState:
    """Shapes of the device state."""
    table = jax.ShapeDtypeStruct((max_num_seqs, num_columns(max_blocks_per_row)), jnp.int32)
    return DeviceState(table, spec.layout.shape(num_blocks))


def empty_state(shapes: DeviceState, device: jax.Device) -> DeviceState:
    """The state before the first request, on `device`."""

    def zeros(shape: jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros(shape.shape, shape.dtype, device=device)

    return DeviceState(zeros(shapes.table), KVCache(*map(zeros, shapes.kv_cache)))


class ModelRunner:
    """One model on one device (mesh).

    `execute` and `collect` may be called from two threads, one each; steps come back in order.
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
        self._buckets = tuple(programs.steps)
        self._params = params
        self._state = state
        self._device = device
        self._num_lines = state.table.shape[0]
        self._mirror = BatchMirror(self._num_lines, max_blocks_per_row)
        self._in_flight: queue.SimpleQueue[_InFlight] = queue.SimpleQueue()
        self._compiles = CompileCounter()

    def warm_up(self) -> None:
        """Runs each program once on nothing."""
        empty = np.zeros(0, np.int32)
        nothing = StepInput(empty, empty, empty.astype(bool), empty, empty, empty)
        self._write(empty, empty)
        for bucket in self._buckets:
            jax.block_until_ready(self._dispatch(nothing, bucket))

    def execute(self, plan: SchedulerOutput) -> None:
        """Starts one step; returns before it is done. What compiles here is counted."""
        with self._compiles:
            self._execute(plan)

    def _execute(self, plan: SchedulerOutput) -> None:
        step = self._mirror.apply(plan)
        bucket = bucket_for(self._buckets, len(step.token_ids), len(step.rows))
        surplus = len(step.values) - bucket.num_writes
        for start in range(0, surplus, EXTRA_WRITES):
            stop = min(start + EXTRA_WRITES, surplus)
            self._write(step.addresses[start:stop], step.values[start:stop])
        if surplus > 0:
            step = step._replace(addresses=step.addresses[surplus:], values=step.values[surplus:])
        tokens = self._dispatch(step, bucket)
        tokens.copy_to_host_async()
        self._in_flight.put(_InFlight(plan.step_id, tokens, step.samples))

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was not collected yet."""
        step_id, tokens, samples = self._in_flight.get()
        sampled = np.asarray(tokens)[: len(samples)][samples]
        return ModelRunnerOutput(step_id, sampled.tolist(), self._compiles.count)

    def _dispatch(self, step: StepInput, bucket: Bucket) -> Int32[Array, " R"]:
        buffer = np.empty(bucket.delta_len, np.int32)
        step.fill(buffer, bucket, self._num_lines)
        upload = jax.device_put(buffer, self._device)
        tokens, self._state = self._programs.steps[bucket](self._params, self._state, upload)
        return tokens

    def _write(self, addresses: Int32[np.ndarray, " W"], values: Int32[np.ndarray, " W"]) -> None:
        """Changes the batch state outside a step."""
        padded = np.full((2, EXTRA_WRITES), np.iinfo(np.int32).max, np.int32)
        padded[0, : len(addresses)] = addresses
        padded[1, : len(values)] = values
        table = self._programs.writes(
            self._state.table, *(jax.device_put(p, self._device) for p in padded)
        )
        self._state = self._state._replace(table=table)
