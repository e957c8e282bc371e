"""Compiles every step before the first request, in parallel and into a cache on disk."""

import concurrent.futures
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from jaxserve.errors import UserError
from jaxserve.worker.batch_state import apply_writes
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.step import DeviceState, StepSpec, forward, sample_and_advance, step

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts what is compiled inside its `with` blocks, by the thread that is in one."""

    _active = threading.local()

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self._active.counter = self

    def __exit__(self, *exc_info: object) -> None:
        self._active.counter = None

    @classmethod
    def on_event(cls, event: str, duration_secs: float, **_: str | int) -> None:
        """jax calls this for everything it measures."""
        counter = getattr(cls._active, "counter", None)
        if counter is not None and event == _COMPILE_EVENT:
            counter.count += 1
            logger.warning("Compiled something after warm-up (%.2f s)", duration_secs)


jax.monitoring.register_event_duration_secs_listener(CompileCounter.on_event)


def use_compilation_cache(directory: Path) -> None:
    """Makes jax keep every program it compiles under `directory`.

    Raises:
      UserError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"--compilation-cache-dir {directory} cannot be written to: {error.strerror}.",
            fix="Use a directory of your own; without one, every start compiles everything.",
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_step(
    spec: StepSpec, bucket: Bucket, params: object, state: DeviceState
) -> jax.stages.Compiled:
    """The step for one bucket: (params, state, buffer) -> (tokens, state). Donates the state.

    `params` and `state` may be arrays or their shapes.
    """

    def jaxserve_step(params, state, buffer):
        return step(spec, bucket, params, state, buffer)

    return _compile(jaxserve_step, (1,), params, state, _buffer_shape(bucket))


def compile_forward(
    spec: StepSpec, bucket: Bucket, params: object, state: DeviceState
) -> jax.stages.Compiled:
    """The first half of the step: (params, state, buffer) -> (logits, state)."""

    def jaxserve_forward(params, state, buffer):
        return forward(spec, bucket, params, state, buffer)

    return _compile(jaxserve_forward, (1,), params, state, _buffer_shape(bucket))


def compile_sample(spec: StepSpec, bucket: Bucket, state: DeviceState) -> jax.stages.Compiled:
    """The second half of the step: (logits, table, buffer) -> (tokens, table)."""

    def jaxserve_sample(logits, table, buffer):
        return sample_and_advance(bucket, logits, table, buffer)

    logits = jax.ShapeDtypeStruct((bucket.num_rows, spec.info.vocab_size), jax.numpy.float32)
    return _compile(jaxserve_sample, (1,), logits, state.table, _buffer_shape(bucket))


def compile_writes(state: DeviceState, num_writes: int) -> jax.stages.Compiled:
    """(table, addresses, values) -> table, for more writes than a step carries."""

    def jaxserve_writes(table, addresses, values):
        return apply_writes(table, addresses, values)

    writes = jax.ShapeDtypeStruct((num_writes,), jax.numpy.int32)
    return _compile(jaxserve_writes, (0,), state.table, writes, writes)


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that a program needs beside its arguments and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not say what its programs need"
    return analysis.temp_size_in_bytes


def _compile(function: Callable, donate: tuple[int, ...], *args: object) -> jax.stages.Compiled:
    with jax.enable_x64(False):  # whatever the program around an LLM has chosen
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def _buffer_shape(bucket: Bucket) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((bucket.delta_len,), jax.numpy.int32)


def run_parallel(
    jobs: Sequence[Callable[[], jax.stages.Compiled]],
) -> list[jax.stages.Compiled]:
    """Runs compile jobs in threads, with a progress bar on a terminal and one log line."""
    started_s = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(job) for job in jobs]
        progress = tqdm(
            concurrent.futures.as_completed(futures),
            total=len(futures),
            desc="Compiling",
            disable=not (sys.stderr.isatty() or "ipykernel" in sys.modules),
        )
        for _ in progress:
            pass
        compiled = [future.result() for future in futures]
    logger.info("Compiled %d programs in %.1f s", len(jobs), time.perf_counter() - started_s)
    return compiled
