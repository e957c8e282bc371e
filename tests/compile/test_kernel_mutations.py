"""Mistakes in the kernels for TPUs and GPUs are found: wrong numbers, and races.

A mistake is put into the source of a kernel's module, which then runs in the simulator. Wrong
numbers are for the comparison that judges all implementations, on a case in which every feature
matters. Races are for the simulators' vector clocks, whatever the numbers are. Here, beside what is
compiled, as it takes as long.
"""

import contextlib
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping

import jaxtyping
import pytest

from pallas_kernels.chips import CHIPS
from tests.kernels import harness
from tests.kernels.cases import Case, Config, RowPlan, make_case

_PACKAGE = "pallas_kernels.ragged_paged_attention."
# Contexts of two blocks of 128 tokens, of which the window hides some.
_CONFIG = Config(
    *(4, 2, 64, 16, "bfloat16", "int8", 140, 3.0, True, True),
    max_tokens=8,
    max_rows=3,
    pages_per_row=12,
)
_PLANS = {
    "decode": [RowPlan(1, 170), RowPlan(0, 20), RowPlan(1, 30)],
    "prefill": [RowPlan(3, 165), RowPlan(0, 20), RowPlan(2, 0)],
}

# Chip and rows that show it -> module -> what it says -> what it says by mistake.
Mistakes = Mapping[tuple[str, str], Mapping[str, Mapping[str, str]]]
WRONG_NUMBERS: Mistakes = {
    ("v6e", "decode"): {
        "tpu_decode": {
            "position < row.kv_len": "position < row.kv_len - 1",
            "is_seen &= position >= row.kv_len - call.sliding_window": "pass",
            "page = common.page_id(table, first + p)": "page = common.page_id(table, first)",
            "out * refs.heads[1, :, :1] if": "out if",
            "jnp.where(is_seen, part, MASKED)": "jnp.where(is_seen & (start < 99), part, MASKED)",
            "layer, table = refs.layer[0]": "layer, table = 1 - refs.layer[0]",
            "cache.at[refs.layer[0], refs.last": "cache.at[1 - refs.layer[0], refs.last",
            "part = jnp.tanh(part) * (call": "part = part * (call",
        },
        "tpu_common": {"score *= jnp.repeat(k_scale, group)": "pass"},
    },
    ("v6e", "prefill"): {
        "tpu_prefill": {
            "where = page_id(refs.table, page + j)": "where = page_id(refs.table, page)",
            "layer = refs.layer[0]": "layer = 1 - refs.layer[0]",
        },
        "tpu_prefill_tile": {
            "is_seen = key <= query": "is_seen = key < query",
            "is_seen &= key > query - window": "pass",
            "(refs.out_factors[head] / total)": "(1 / total)",
            "// (pages * page_size) + 1": "// (pages * page_size)",
        },
        "tpu_kv_write": {
            "page=page_id(table_ref, base // page_size)": "page=page_id(table_ref, 0 * base)",
            "(token + part < end)": "(token + part < end - 1)",
        },
        "tpu_common": {"score *= jnp.repeat(k_scale, group)": "pass"},
    },
    ("h100", "decode"): {
        "gpu_decode": {
            "is_seen = (position < ring.end)": "is_seen = (position < ring.end - 1)",
            "& (position >= visible)": "",
            "out if v_scale_ref is None else out * v_scale_ref[head]": "out",
            "(1 if k_scale_ref is None else k_scale_ref[head])": "1",
        },
        "gpu_ring": {
            "self.source.pages[self.row, ": "self.source.pages[self.row, 0 * ",
            "pl.cdiv(self.end - self.begin, self.sizes.tokens)": "jnp.int32(1)",
            "(self.source.layer * num_pages": "((1 - self.source.layer) * num_pages",
        },
    },
    ("h100", "prefill"): {
        "gpu_prefill_common": {
            "column <= last": "column < last",
            "sees &= column > last - window * group": "pass",
            "sees = column <= last": "sees = (column <= last) & (start < 99)",
            '(refs["k_scale"][item.head] if': "(1.0 if",
            'factor = factor * refs["v_scale"][item.head]': "pass",
            "jnp.exp2(sinks - peak)": "0",
        },
        "gpu_prefill_wgmma": {
            'refs["pages"][item.row, index]': 'refs["pages"][item.row, 0]',
            'refs["layer"][0] *': '(1 - refs["layer"][0]) *',
        },
    },
    ("b200", "prefill"): {
        "gpu_prefill_common": {
            "column <= last": "column < last",
            "sees &= column > last - window * group": "pass",
            '(refs["k_scale"][item.head] if': "(1.0 if",
            'factor = factor * refs["v_scale"][item.head]': "pass",
        },
        "gpu_prefill_mma": {
            "acc * lax.broadcast_in_dim(rescale, acc.shape, [0])": "acc",
            "item.first, item.end)": "item.first, item.end - 1)",
            "start = item.first + i * problem.context": "start = i * problem.context",
        },
        "gpu_ring": {"self.source.pages[self.row, ": "self.source.pages[self.row, 0 * "},
    },
}

# What shows races: rings that go round, buffers that several rows and tiles use.
_PLAIN = Config(*(4, 2, 64, 64, "bfloat16", "bfloat16"), max_tokens=40, max_rows=3)
_RACY = {
    ("v6e", "decode"): (
        dataclasses.replace(_PLAIN, pages_per_row=10),
        [RowPlan(1, 600), RowPlan(1, 20), RowPlan(1, 130)],
    ),
    ("v6e", "prefill"): (
        dataclasses.replace(_PLAIN, page_size=16, pages_per_row=24),
        [RowPlan(36, 300), RowPlan(3, 30)],
    ),
    ("h100", "decode"): (
        dataclasses.replace(_PLAIN, pages_per_row=18),
        [RowPlan(1, 1100), RowPlan(1, 30)],
    ),
    ("h100", "prefill"): (
        dataclasses.replace(_PLAIN, pages_per_row=9),
        [RowPlan(20, 500), RowPlan(9, 420)],
    ),
    ("a100", "decode"): (
        dataclasses.replace(_PLAIN, pages_per_row=18),
        [RowPlan(1, 1100), RowPlan(1, 30)],
    ),
    ("a100", "prefill"): (
        dataclasses.replace(_PLAIN, num_kv_heads=4, pages_per_row=4),
        [RowPlan(20, 200), RowPlan(9, 120)],
    ),
    ("b200", "prefill"): (
        dataclasses.replace(_PLAIN, num_kv_heads=4, pages_per_row=4),
        [RowPlan(20, 200), RowPlan(9, 120)],
    ),
    ("h100", "prefill int8"): (
        dataclasses.replace(_PLAIN, kv_dtype="int8", has_scales=True, pages_per_row=9),
        [RowPlan(20, 500), RowPlan(9, 420)],
    ),
}

# As above; the first of each module is in the fast subset.
RACES: Mistakes = {
    ("v6e", "decode"): {
        "tpu_decode": {
            # Blocks, half of a block's bytes, one more block ahead than there are buffers for.
            "    _wait_block(kernel, buffer, num_pages)": "    pass",
            "wait(pl.ds(0, size))": "wait(pl.ds(0, size // 2))",
            "range(sizes.num_buffers - 2)": "range(sizes.num_buffers - 1)",
            # Block tables, queries, results before their buffer is used again and at the end.
            "        _table_copies(kernel, i, lambda copy: copy.wait())": "        pass",
            "        copy.wait()\n\n    @pl.when(i >=": "        pass\n\n    @pl.when(i >=",
            "        _wait_results(kernel, i & (OUT_SLOTS - 1))": "        pass",
            "                _wait_results(kernel, slot)": "                pass",
        },
    },
    ("v6e", "prefill"): {
        "tpu_prefill": {
            '_block_dmas(shape, refs, layer, tile, block, buffer, "wait")': "pass",
            "        _copy_queries(refs, tile).wait()": "        pass",
            "            dma.wait()\n\n        size": "            pass\n\n        size",
        },
        "tpu_kv_write": {
            '        reads(i, "wait")': "        pass",
            '            writes(i - 2, "wait")': "            pass",
            '    writes(last, "wait")': "    pass",
        },
    },
    ("h100", "decode"): {
        "gpu_ring": {
            "plgpu.barrier_wait(self.memory.barriers[which].at[slot])": "pass",
            "(block + self.sizes.stages, is_free": "(block + self.sizes.stages - 1, is_free",
            "plgpu.commit_smem()  # the block": "pass  # the block",
        },
    },
    ("h100", "prefill"): {
        "gpu_prefill_wgmma": {
            "step >= static.num_stages": "step > static.num_stages",
            'plgpu.barrier_wait(refs["k_ready"].at[slot])': "pass",
            'plgpu.barrier_wait(refs["v_ready"].at[slot])': "pass",
            "plgpu.commit_smem()\n            for": "pass\n            for",
            "plgpu.barrier_wait(ready)\n": "pass\n",
            "plgpu.wait_smem_to_gmem(0)": "pass",
        },
    },
    ("a100", "decode"): {
        "gpu_ring": {
            "(self.sizes.stages - 1) * 2 *": "self.sizes.stages * 2 *",
            "(block + self.sizes.stages, is_free": "(block + self.sizes.stages - 1, is_free",
        },
    },
    ("a100", "prefill"): {
        "gpu_ring": {
            "(self.sizes.stages - 1) * 2 *": "self.sizes.stages * 2 *",
            "plgpu.wait_gmem_to_smem(0)": "pass",
        },
    },
    ("b200", "prefill"): {
        "gpu_ring": {
            "plgpu.commit_smem()\n\n    def": "pass\n\n    def",
            "plgpu.barrier_wait(self.memory.barriers[which].at[slot])": "pass",
            "plgpu.commit_smem()  # the block": "pass  # the block",
        },
    },
    ("h100", "prefill int8"): {
        "gpu_prefill_wgmma": {
            'plgpu.barrier_wait(refs[f"{short}_arrived"])': "pass",
            "commit_smem()\n        plgpu.barrier_arrive": "barrier_arrive",
        },
    },
}


def _all(mistakes: Mistakes) -> list[tuple[str, str, str, str, str]]:
    return [
        (*where, module, right, wrong)
        for where, modules in mistakes.items()
        for module, changes in modules.items()
        for right, wrong in changes.items()
    ]


def _case(chip: str, rows: str) -> Case:
    return make_case(dataclasses.replace(_CONFIG, chip=chip), _PLANS[rows], seed=1)


def _racy_case(chip: str, rows: str) -> Case:
    config, plans = _RACY[chip, rows]
    return make_case(dataclasses.replace(config, chip=chip), plans, seed=1)


def _check(case: Case) -> None:
    harness._compiled.cache_clear()
    implementation = CHIPS[case.config.chip].platform
    harness.check(case, case.expected(), harness.run(implementation, case))


@contextlib.contextmanager
def _mistake(module_name: str, right: str, wrong: str) -> Iterator[None]:
    """The module as if its source had `wrong` where it has `right`."""
    module = importlib.import_module(_PACKAGE + module_name)
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{source.count(right)} times in {module_name}: {right}"
    names = vars(module)
    before = dict(names)
    # Modules that have its functions by name.
    importers = [
        (other, name)
        for other in [m for path, m in sys.modules.items() if path.startswith(_PACKAGE)]
        for name, value in vars(other).items()
        if other is not module and inspect.isfunction(value) and before.get(name) is value
    ]
    exec(compile(source.replace(right, wrong), f"{module_name} with a mistake", "exec"), names)
    with pytest.MonkeyPatch.context() as patch:
        for other, name in importers:
            patch.setattr(other, name, names[name])
        # Other modules' annotations name the classes that it had.
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        try:
            yield
        finally:
            names.clear()
            names.update(before)


def test_every_mistake_can_be_made():
    for *_, module, right, wrong in _all(WRONG_NUMBERS) + _all(RACES):
        with _mistake(module, right, wrong):
            pass


# Simulators multiply what is in dead slots, too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


@pytest.mark.takes_minutes
@pytest.mark.parametrize(("chip", "rows"), WRONG_NUMBERS, ids=map("-".join, WRONG_NUMBERS))
def test_passes_without_a_mistake(chip, rows):
    _check(_case(chip, rows))


@pytest.mark.takes_minutes
@pytest.mark.parametrize(("chip", "rows"), RACES, ids=map("-".join, RACES))
def test_there_is_no_race_without_a_mistake(chip, rows):
    _check(_racy_case(chip, rows))


@pytest.mark.takes_minutes
@pytest.mark.parametrize(("chip", "rows", "module", "right", "wrong"), _all(WRONG_NUMBERS))
def test_finds_wrong_numbers(chip, rows, module, right, wrong):
    case = _case(chip, rows)
    with _mistake(module, right, wrong), pytest.raises(AssertionError, match=r"are off|differs"):
        _check(case)


_FAST_RACES = {race[2]: race for race in reversed(_all(RACES))}.values()
_RACES = [
    pytest.param(*race, marks=[] if race in _FAST_RACES else [pytest.mark.takes_minutes])
    for race in _all(RACES)
]


@pytest.mark.parametrize(("chip", "rows", "module", "right", "wrong"), _RACES)
def test_finds_race(chip, rows, module, right, wrong):
    case = _racy_case(chip, rows)
    with _mistake(module, right, wrong), pytest.raises(Exception, match="RACE DETECTED"):
        _check(case)
