"""What surrounds compiling: the counter, parallel jobs, the cache on disk, the memory report."""

import functools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.errors import UserError
from jaxserve.worker import programs, warmup
from jaxserve.worker.program_store import ProgramStore
from jaxserve.worker.warmup import CompileCounter
from tests.worker import tiny

_CACHE_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def compiled(factor: int) -> jax.stages.Compiled:
    """A program like no other."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.jit(lambda x: x * factor + 1).lower(shape).compile()


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path, jax.devices()[:1])


def test_each_compilation_is_counted_and_logged(caplog):
    zeros = jnp.zeros(4)
    compiled(1001)
    counter, other = CompileCounter(), CompileCounter()
    with counter:
        program = compiled(1002)
        assert counter.count == 1
        program(zeros).block_until_ready()
        assert counter.count == 1
        jax.jit(lambda x: x * 1003)(zeros)
        thread = threading.Thread(target=compiled, args=(1004,))  # somebody else's
        thread.start()
        thread.join()
    compiled(1005)
    assert (counter.count, other.count) == (2, 0)
    assert sum("Compiled something after warm-up" in r.message for r in caplog.records) == 2


def test_a_cache_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--compilation-cache-dir"):
        warmup.use_compilation_cache(tmp_path / "file" / "cache")


def test_programs_do_not_depend_on_x64():
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tiny.params())
    with jax.enable_x64(True):
        program = programs.compile_forward(tiny.SPEC, tiny.SMALL, params, tiny.shapes().step)
    logits, rows, _ = program.out_info
    assert (logits.dtype, rows.dtype) == (jnp.float32, jnp.int32)


def test_jobs_run_side_by_side_and_come_back_by_key(monkeypatch, caplog, store):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    barrier = threading.Barrier(3)

    def job(factor: int) -> jax.stages.Compiled:
        if factor < 2004:  # the first three wait for each other
            barrier.wait(timeout=30)
        return compiled(factor)

    with caplog.at_level(logging.INFO, warmup.__name__):
        factors = range(2001, 2006)
        done = warmup.run_parallel({f: functools.partial(job, f) for f in factors}, store)
    ones = jnp.ones(4)
    assert {f: int(program(ones)[0]) - 1 for f, program in done.items()} == {f: f for f in factors}
    assert "5 loaded" not in caplog.text and "5 compiled" in caplog.text


def test_a_job_that_fails_fails_the_warm_up(store):
    def fail() -> jax.stages.Compiled:
        raise MemoryError("too large")

    with pytest.raises(MemoryError, match="too large"):
        jobs = {1: functools.partial(compiled, 2101), 2: functools.partial(fail)}
        warmup.run_parallel(jobs, store)


@pytest.fixture
def restored_cache() -> Iterator[None]:
    """The cache of the whole test run is put back."""
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in _CACHE_OPTIONS}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("restored_cache")
def test_every_program_is_kept_on_disk(tmp_path: Path):
    warmup.use_compilation_cache(tmp_path / "programs")
    compiled(3001)  # small and quick, and kept all the same
    kept = sorted(path.name for path in (tmp_path / "programs").iterdir())
    assert kept
    compiled(3001)
    assert sorted(path.name for path in (tmp_path / "programs").iterdir()) == kept
    compiled(3002)
    assert len(list((tmp_path / "programs").iterdir())) > len(kept)


def test_temporary_memory_is_what_the_program_holds_beside_its_arguments():
    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    bytes_of_one = 512 * 512 * 4
    in_place = jax.jit(lambda x: x + 1).lower(shape).compile()
    product = jax.jit(lambda x: (x @ x) @ (x @ x.T)).lower(shape).compile()
    assert warmup.temp_bytes(in_place) < bytes_of_one
    assert bytes_of_one <= warmup.temp_bytes(product) <= 3 * bytes_of_one
