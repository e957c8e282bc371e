"""Mistakes in the kernels for TPUs and GPUs are found by the comparison that judges them.

A mistake is put into the source of a kernel's module, which then runs in the simulator on a case
in which every feature matters. Here, beside what is compiled, as it takes as long.
"""

import contextlib
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator

import jaxtyping
import pytest

from tests.kernels import harness
from tests.kernels.cases import Case, Config, RowPlan, make_case

_PACKAGE = "pallas_kernels.ragged_paged_attention."
_CHIPS = {"tpu": "v6e", "gpu": "h100", "gpu by mma.sync": "b200"}
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

# Platform and rows that show it -> module -> what it says -> what it says by mistake.
MISTAKES = {
    ("tpu", "decode"): {
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
    ("tpu", "prefill"): {
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
    },
    ("gpu", "decode"): {
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
    ("gpu", "prefill"): {
        "gpu_prefill_common": {
            "column <= last": "column < last",
            "sees &= column > last - window * group": "pass",
            "sees = column <= last": "sees = (column <= last) & (start < 99)",
            'factor = factor * refs["v_scale"][item.head]': "pass",
            "jnp.exp2(sinks - peak)": "0",
        },
        "gpu_prefill_wgmma": {
            'refs["pages"][item.row, index]': 'refs["pages"][item.row, 0]',
            'refs["layer"][0] *': '(1 - refs["layer"][0]) *',
        },
    },
    ("gpu by mma.sync", "prefill"): {
        "gpu_prefill_mma": {
            "acc * lax.broadcast_in_dim(rescale, acc.shape, [0])": "acc",
            "item.first, item.end)": "item.first, item.end - 1)",
            "start = item.first + i * problem.context": "start = i * problem.context",
        },
    },
}
_ALL = [
    (*where, module, right, wrong)
    for where, modules in MISTAKES.items()
    for module, mistakes in modules.items()
    for right, wrong in mistakes.items()
]


def _case(platform: str, rows: str) -> Case:
    return make_case(dataclasses.replace(_CONFIG, chip=_CHIPS[platform]), _PLANS[rows], seed=1)


def _check(platform: str, case: Case) -> None:
    harness._compiled.cache_clear()
    implementation = platform.split()[0]
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
    for *_, module, right, wrong in _ALL:
        with _mistake(module, right, wrong):
            pass


@pytest.mark.takes_minutes
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("platform", "rows"), MISTAKES, ids=map("-".join, MISTAKES))
def test_passes_without_a_mistake(platform, rows):
    _check(platform, _case(platform, rows))


@pytest.mark.takes_minutes
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("platform", "rows", "module", "right", "wrong"), _ALL)
def test_finds(platform, rows, module, right, wrong):
    case = _case(platform, rows)
    with _mistake(module, right, wrong), pytest.raises(AssertionError, match=r"are off|differs"):
        _check(platform, case)
