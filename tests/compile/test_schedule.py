"""The compiler's schedules of the TPU prefill kernel: nothing spills, and matrix units are busy."""

import importlib
from pathlib import Path

import pytest

from pallas_kernels.chips import CHIPS

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
LLAMA = "Llama-3-8B, prefill"


@pytest.fixture
def tpu_schedule(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("tpu_schedule")


@pytest.mark.takes_minutes
@pytest.mark.parametrize("name", [LLAMA, "Qwen3-32B and Llama-3.3-70B, 1x8, prefill"])
@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_inner_loops_spill_nothing_and_keep_matrix_units_busy(tpu_schedule, chip, name):
    chip, case = CHIPS[chip], tpu_schedule.CASES[name]
    modelled = tpu_schedule.model(chip, case, tpu_schedule.Program("tpu_prefill", {}))
    assert modelled.loops
    for loop in modelled.loops:
        assert (loop.fills, loop.spills) == (0, 0)
        assert modelled.busy(loop) >= 0.6


@pytest.mark.takes_minutes
@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_takes_no_more_cycles_than_the_kernel_of_jax(tpu_schedule, chip):
    chip, case = CHIPS[chip], tpu_schedule.CASES[LLAMA]
    programs = ("ours", {}), ("jax", tpu_schedule.jax_sizes(chip, case))
    ours, theirs = (
        tpu_schedule.model(chip, case, tpu_schedule.Program(*program)) for program in programs
    )
    assert ours.cycles <= theirs.cycles


@pytest.mark.takes_minutes
@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_rows_of_few_tokens_take_a_fraction_of_a_large_tile(tpu_schedule, chip):
    chip, case = CHIPS[chip], tpu_schedule.Case(32, 8, num_rows=64, q_len=16, kv_len=4096)
    large = {"num_queries": 512, "num_keys": 1024 if chip.name == "v6e" else 512}
    small, before = (
        tpu_schedule.model(chip, case, tpu_schedule.Program("tpu_prefill", sizes))
        for sizes in ({}, {"tpu_prefill_few": large})
    )
    assert [(loop.fills, loop.spills) for loop in small.loops] == [(0, 0)] * 2
    assert small.cycles * 4 < before.cycles
