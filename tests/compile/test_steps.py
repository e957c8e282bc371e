"""Whole serving steps of real models compile for real chips: nothing is copied, no more is moved
between devices than must be, and it fits.
"""

import dataclasses

import pytest

from pallas_kernels.chips import CHIPS
from tests.compile import hlo
from tests.compile.compilers import Compiled, Compilers
from tests.compile.steps import (
    GIB,
    MAX_ROWS,
    MAX_TOKENS,
    MEMORY_BYTES,
    Step,
    attention_of,
    check_sampling,
    compiled,
)

_MODELS = ("Llama-3-8B", "Qwen3-32B", "Llama-3.3-70B")


def steps(is_fast: bool) -> list[tuple[Step, ...]]:
    """Jobs that belong together: with half as many KV blocks too, where that is looked at."""
    fast = [
        Step("v5e", "Llama-3-8B", 4, MAX_ROWS),
        Step("tpu7x", "Llama-3.3-70B", 8, MAX_ROWS),
        Step("h100", "Llama-3.3-70B", 8, MAX_ROWS),
        Step("b200", "Llama-3-8B", 4, MAX_TOKENS),
        Step("h100", "Llama-3-8B", 4, MAX_ROWS, samples=True),
    ]
    if is_fast:
        return [(step,) for step in fast]
    every = [
        Step(chip, model, num_devices, num_tokens)
        for chip in MEMORY_BYTES
        for model in _MODELS
        for num_devices in (4, 8)
        for num_tokens in (MAX_ROWS, MAX_TOKENS)
    ]
    fitting = [step for step in every if step.free_bytes > 2 * GIB]
    together = [(step, dataclasses.replace(step, cache_share=0.5)) for step in fitting]
    samplings = [
        Step(chip, model, 8, MAX_ROWS, samples=True)
        for chip in MEMORY_BYTES
        for model in _MODELS[:2]
    ]
    return together + [(step,) for step in samplings]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "jobs" in metafunc.fixturenames:
        jobs = steps(bool(metafunc.config.getoption("fast")))
        metafunc.parametrize("jobs", jobs, ids=[str(step) for step, *_ in jobs])


def test_step(compilers: Compilers, table: list[str], jobs: tuple[Step, ...]) -> None:
    results = [compiled(compilers, step) for step in jobs]
    for step, result in zip(jobs, results, strict=True):
        if step.samples:
            check_sampling(step, result)
        else:
            check_forward(step, result)
    result = results[-1]
    temp_sizes = {each.temp_bytes for each in results}
    assert len(temp_sizes) == 1, f"temporary bytes depend on the number of blocks: {temp_sizes}"
    moved = hlo.collectives(result.hlo)
    names = ", ".join(f"{each.name} {each.num_bytes} B" for each in moved)
    if not jobs[0].samples and CHIPS[jobs[0].chip].platform == "gpu":
        names += f"; {len(hlo.kernels_of_loops(result.hlo))} kernels in loops"
    table.append(
        f"{jobs[0]}, {attention_of(jobs[0])}: {result.argument_bytes / GIB:.2f} GiB given, "
        f"{result.temp_bytes / GIB:.2f} GiB temporary; {names}"
    )


def check_forward(step: Step, result: Compiled) -> None:
    """In place, without a copy of the cache or of weights, and with three sums over devices."""
    info = step.config.info
    layer_bytes = step.layer_bytes
    assert result.alias_bytes >= 2 * info.num_layers * layer_bytes, "the cache is not donated"
    # Half of the keys of a layer, or its gate and up; what is no larger may be activations.
    gate_up = 2 * 2 * info.intermediate_size * info.hidden_size // step.num_devices
    # In float32, as of gate or up; in fusions for GPUs, where nothing is written, of both.
    num_mlp = 2 if CHIPS[step.chip].platform == "gpu" else 1
    widest = max(info.hidden_size, num_mlp * info.intermediate_size // step.num_devices)
    activations = 4 * step.num_tokens * widest
    assert not hlo.copies(result.hlo, max(activations + 1, min(layer_bytes // 2, gate_up)))
    used = result.argument_bytes + result.temp_bytes + result.output_bytes - result.alias_bytes
    assert used < MEMORY_BYTES[step.chip] * GIB
    moved = hlo.collectives(result.hlo)
    # The embedding, which is split by token; in the loop over layers, after attention and MLP.
    assert [each.name for each in moved] == ["all-reduce"] * 3, moved
    assert {each.num_bytes for each in moved} == {2 * step.num_tokens * info.hidden_size}
    assert sum("psum" in each.source and "while" in each.source for each in moved) == 2
    assert sum("gather" in each.source for each in moved) == 1
    if CHIPS[step.chip].platform == "gpu":
        weights = step.layer_weights
        for kernel in hlo.kernels_of_loops(result.hlo):
            assert not [dims for dims in kernel.dims if dims in weights], f"a copy: {kernel}"
    if attention_of(step) == "gpu":
        # Where work lies does not depend on the layer: no layer makes arrays of integers.
        assert not [each for each in hlo.kernels_of_loops(result.hlo) if each.is_of_integers]
