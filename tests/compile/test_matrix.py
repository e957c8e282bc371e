"""Every feature of ragged paged attention compiles for every chip, and nothing copies the cache."""

import dataclasses
import itertools

import pytest

from pallas_kernels.aot import COMPILED_CHIPS
from pallas_kernels.ragged_paged_attention import AUTO_ORDER, explain
from tests.compile import hlo
from tests.compile.cells import CHIPS_WITH_KERNELS, LEVELS, Cell, each_once, one_by_one, pairwise
from tests.compile.compilers import Compilers, Refused

# What a kernel of Mosaic is called in the HLO.
_KERNELS = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "jobs" not in metafunc.fixturenames:
        return
    is_fast = metafunc.config.getoption("fast", default=False)
    cells = each_once() if is_fast else list(dict.fromkeys([*pairwise(), *one_by_one()]))
    # With half as many pages too: every cell, or the first of a chip of each platform.
    first = {cell.chip: cell for cell in reversed(cells)}
    twice = [first["v6e"], first["h100"]] if is_fast else cells
    jobs = [
        (cell, dataclasses.replace(cell, cache_share=0.5)) if cell in twice else (cell,)
        for cell in cells
    ]
    metafunc.parametrize("jobs", jobs, ids=map(str, cells))


def test_compiles_and_copies_no_cache(
    compilers: Compilers, table: list[str], jobs: tuple[Cell, ...]
) -> None:
    explanation = explain(jobs[0].call)
    assert explanation.chosen == _expected(jobs[0]), explanation
    temp_sizes = set()
    for cell in jobs:
        result = compilers.submit(cell).result()
        assert not isinstance(result, Refused), f"{cell}, {explanation}: {result.words}"
        layer_bytes = hlo.num_bytes(cell.cache.k) // 2
        assert result.alias_bytes >= 2 * hlo.num_bytes(cell.cache.k), "the cache is not donated"
        # Half of a cache's layer may be smaller than what thousands of tokens need for themselves.
        if cell is jobs[0]:
            assert result.temp_bytes < layer_bytes, f"{result.temp_bytes} temporary bytes"
        assert not hlo.copies(result.hlo, layer_bytes // 2)
        if explanation.chosen in _KERNELS:
            assert _KERNELS[explanation.chosen] in result.hlo
        assert not any(kernel.spilled_bytes for kernel in result.kernels), result.kernels
        temp_sizes.add(result.temp_bytes)
    # XLA may have queries or outputs in VMEM in the one program and not in the other.
    spread = max(temp_sizes) - min(temp_sizes)
    assert spread <= 2 * _query_bytes(jobs[0]), f"the cache's size shows: {temp_sizes}"
    table.append(f"{jobs[0]}: {explanation}; {max(temp_sizes)} B temporary; {result.kernels}")


def _query_bytes(cell: Cell) -> int:
    """Of the step's queries in float32, their heads as wide as TPUs have them."""
    return cell.size[0] * cell.call.num_heads * max(128, cell.head_dim) * 4


def _expected(cell: Cell) -> str:
    """The implementation that a cell gets.

    TPUs have a kernel for all of it, GPUs for all but float32, and a float8 that they do not know.
    """
    chip = cell.call.chip
    best, second, *_ = AUTO_ORDER[chip.platform]
    if chip.platform == "tpu":
        return best
    if cell.dtypes[0] == "float32":
        return second
    is_float8 = cell.dtypes[1].startswith("float8")
    return second if is_float8 and chip.capability < (8, 9) else best


def test_the_fast_subset_has_every_level_on_both_platforms():
    cells = each_once()
    assert {cell.chip for cell in cells} == set(COMPILED_CHIPS)
    for chip in CHIPS_WITH_KERNELS[:2]:
        for name in LEVELS.keys() - {"chip"}:
            met = {getattr(cell, name) for cell in cells if cell.chip == chip}
            assert met == set(LEVELS[name]), (chip, name)


def test_every_pair_of_levels_is_there():
    cells = [dataclasses.asdict(cell) for cell in pairwise()]
    for cell in cells:
        is_own = cell["chip"] in CHIPS_WITH_KERNELS
        cell["platform"] = COMPILED_CHIPS[cell["chip"]].platform if is_own else None
    assert {cell["chip"] for cell in cells} == set(COMPILED_CHIPS)
    levels = {**LEVELS, "chip": CHIPS_WITH_KERNELS, "platform": ("tpu", "gpu")}
    for a, b in itertools.combinations(levels, 2):
        if "chip" in (a, b) and "dtypes" not in (a, b):
            continue
        for pair in itertools.product(levels[a], levels[b]):
            assert any((cell[a], cell[b]) == pair for cell in cells), (a, b, pair)
