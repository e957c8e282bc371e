"""Programs on disk: found again without being traced, and never a wrong one."""

import functools
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.worker import program_store, warmup
from jaxserve.worker.program_store import Job, ProgramStore

traced: list[int] = []


def compile_affine(factor: int, offset: int) -> jax.stages.Compiled:
    """x * factor + offset, in place; what is traced is noted."""

    def run(x: jax.Array) -> jax.Array:
        traced.append(factor)
        return x * factor + offset

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.jit(run, donate_argnums=0).lower(shape).compile()


def compile_scaled(function) -> jax.stages.Compiled:
    return compile_affine(function(1), 0)


@pytest.fixture
def job() -> Iterator[Job]:
    """One that jax's own cache does not have, nor keeps however long a busy machine compiles it."""
    traced.clear()
    longest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600.0)
    yield functools.partial(compile_affine, random.randrange(10**6), 1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", longest)


def open_store(directory: Path) -> ProgramStore:
    """As a process that has just started would."""
    return ProgramStore(directory, jax.devices()[:1])


def test_a_program_is_traced_once(tmp_path, job):
    first = open_store(tmp_path).load_or_run(job)
    store = open_store(tmp_path)
    again = store.load_or_run(job)
    assert (len(traced), store.num_loaded) == (1, 1)
    expected = 2.0 * job.args[0] + 1
    for program in (first, again):
        x = jnp.full(4, 2.0)
        assert program(x).tolist() == [expected] * 4
        assert x.is_deleted()
    assert warmup.temp_bytes(again) == warmup.temp_bytes(first)
    assert warmup.result_bytes(again) == warmup.result_bytes(first) == 0


def test_another_argument_is_another_program(tmp_path, job):
    open_store(tmp_path).load_or_run(job)
    other = functools.partial(compile_affine, job.args[0], 7)
    store = open_store(tmp_path)
    assert store.load_or_run(other)(jnp.zeros(4)).tolist() == [7.0] * 4
    assert store.num_loaded == 0


def test_another_version_of_the_sources_finds_nothing(tmp_path, job, monkeypatch):
    open_store(tmp_path).load_or_run(job)
    copy = tmp_path / "pallas_kernels"
    (copy / "op").mkdir(parents=True)
    (copy / "op" / "tpu.py").write_text("BLOCK = 1")
    monkeypatch.setattr(program_store.pallas_kernels, "__path__", [str(copy)])
    store = open_store(tmp_path)
    store.load_or_run(job)
    assert (store.num_loaded, len(traced)) == (0, 2)
    (copy / "op" / "tpu.py").write_text("BLOCK = 2")
    assert program_store._fingerprint(jax.devices()[:1]) != store._fingerprint


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_other_flags_of_the_compiler_find_nothing(name, monkeypatch):
    before = program_store._fingerprint(jax.devices()[:1])
    monkeypatch.setenv(name, "--some_flag")
    assert program_store._fingerprint(jax.devices()[:1]) != before


@pytest.mark.parametrize("damage", ["cut", "one bit", "garbage"])
def test_a_broken_file_is_logged_and_written_anew(tmp_path, job, caplog, damage):
    open_store(tmp_path).load_or_run(job)
    (path,) = tmp_path.glob("*.program")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"cut": data[:100], "one bit": data, "garbage": b"no program"}[damage])
    assert open_store(tmp_path).load_or_run(job)(jnp.zeros(4)).tolist() == [1.0] * 4
    assert "is made again" in caplog.text and path.name in caplog.text
    assert len(traced) == 2
    store = open_store(tmp_path)
    store.load_or_run(job)
    assert store.num_loaded == 1


def test_a_directory_that_takes_nothing_costs_no_start(tmp_path, job, caplog):
    store = open_store(tmp_path / "gone")
    with caplog.at_level(logging.WARNING, program_store.__name__):
        assert store.load_or_run(job)(jnp.zeros(4)).tolist() == [1.0] * 4
    assert "cannot be kept" in caplog.text


def test_what_no_name_tells_apart_is_not_kept(tmp_path):
    """Such as the logits processors of other packages."""
    open_store(tmp_path).load_or_run(functools.partial(compile_scaled, lambda x: 2 * x))
    assert not list(tmp_path.iterdir())


def test_what_comes_from_jaxs_own_cache_is_not_kept(tmp_path, job, monkeypatch):
    """On a CPU it would be written without its code."""

    def run() -> jax.stages.Compiled:
        program = job()
        jax.monitoring.record_event(program_store._CACHE_HIT_EVENT)
        return program

    monkeypatch.setattr(run, "__qualname__", "run")
    open_store(tmp_path).load_or_run(functools.partial(run))
    assert not list(tmp_path.iterdir())
