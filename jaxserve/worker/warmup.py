"""What surrounds compiling: many at once, kept on disk, and counted when there should be none."""

import concurrent.futures
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Mapping
from pathlib import Path

import jax
from tqdm import tqdm

from jaxserve.errors import UserError
from jaxserve.worker.program_store import Job, ProgramStore

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
            fix="Name a directory that can be written with --compilation-cache-dir.",
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that a program needs beside its arguments and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not say what its programs need"
    return analysis.temp_size_in_bytes


def result_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that a program's results need beside donated arguments."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not say what its programs need"
    return max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def run_parallel[Key: Hashable](
    jobs: Mapping[Key, Job], store: ProgramStore
) -> dict[Key, jax.stages.Compiled]:
    """Runs compile jobs in threads, with a progress bar on a terminal and one log line.

    store: is asked before anything compiles, and keeps what did.
    """
    started_s = time.perf_counter()
    num_loaded = store.num_loaded
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {key: pool.submit(store.load_or_run, job) for key, job in jobs.items()}
        progress = tqdm(
            concurrent.futures.as_completed(futures.values()),
            total=len(futures),
            desc="Compiling",
            disable=not (sys.stderr.isatty() or "ipykernel" in sys.modules),
        )
        for _ in progress:
            pass
        compiled = {key: future.result() for key, future in futures.items()}
    num_loaded = store.num_loaded - num_loaded
    logger.info(
        "%d programs in %.1f s: %d loaded, %d compiled",
        len(jobs),
        time.perf_counter() - started_s,
        num_loaded,
        len(jobs) - num_loaded,
    )
    return compiled
