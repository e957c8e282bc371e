"""The prefill kernels for GPUs, simulated, against the oracle; rows of one token are not theirs."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import gpu_prefill, gpu_prefill_wgmma
from tests.kernels import gpu_simulator
from tests.kernels.cases import Config, RowPlan, make_case
from tests.kernels.gpu_calls import attention_call, gpu_call, rows_of

# The simulator multiplies what is in dead slots, too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

BASE = Config(4, 2, 64, 16, "bfloat16", "bfloat16", max_tokens=34, max_rows=4, pages_per_row=12)

# Multiprocessors: one does all the work, so that the ring of K and V goes round.
_NUM_CORES = 1


def check(config: Config, plans: list[RowPlan], seed: int = 0) -> None:
    case = make_case(config, plans, seed)
    call = attention_call(config, _NUM_CORES)
    assert gpu_prefill.unsupported_reason(call) is None
    plan = gpu_prefill.plan(call, rows_of(case))
    with gpu_simulator.simulate():
        result = gpu_prefill.prefill_rows(gpu_call(case, _NUM_CORES), plan)
    assert (result.shape, result.dtype) == (case.q.shape, case.q.dtype)
    out = np.asarray(result).astype(np.float64)
    expected = case.expected()
    start = 0
    for r, row in enumerate(plans):
        tokens = slice(start, start + row.q_len)
        if row.q_len == 1:
            np.testing.assert_array_equal(out[tokens], 0)
        else:
            error = np.abs(out[tokens] - expected.out[tokens])
            assert (error <= expected.tolerance[tokens]).all(), f"row {r}: {np.nanmax(error)}"
        start += row.q_len
    np.testing.assert_array_equal(out[start:], 0)


MIXED = [RowPlan(20, 150), RowPlan(1, 60), RowPlan(0, 20), RowPlan(9, 120)]


# Together with the common suite: every head dim, dtype and feature; groups of query heads that
# divide 8 and that do not; pages below, beside and above a block of context. By wgmma on h100, by
# mma.sync on a100 (cp.async) and b200 (TMA).
CONFIGS = {
    "h100-gqa2-h128": dict(head_dim=128),
    "h100-gqa3-h96-page48-e5m2": dict(
        num_heads=6, head_dim=96, page_size=48, kv_dtype="float8_e5m2", pages_per_row=4
    ),
    "h100-h256-page256-int8": dict(
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        page_size=256,
        kv_dtype="int8",
        has_scales=True,
        pages_per_row=1,
    ),
    "b200-f16-mha-h80-window-page64": dict(
        num_heads=2,
        head_dim=80,
        page_size=64,
        q_dtype="float16",
        kv_dtype="float16",
        sliding_window=50,
        pages_per_row=3,
    ),
    "a100-mqa16-h128-soft-cap-sinks": dict(
        num_heads=16, num_kv_heads=1, head_dim=128, soft_cap=3.0, has_sinks=True
    ),
    "b200-gqa4-h256-page16-e4m3": dict(
        num_kv_heads=1, head_dim=256, kv_dtype="float8_e4m3fn", has_scales=True
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_oracle(name):
    check(dataclasses.replace(BASE, chip=name[:4], **CONFIGS[name]), MIXED)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_wgmma_has_a_block_on_its_way_while_another_is_computed(head_dim, kv_dtype):
    config = dataclasses.replace(BASE, chip="h100", head_dim=head_dim, kv_dtype=kv_dtype)
    sizes = gpu_prefill_wgmma.block_sizes(attention_call(config, _NUM_CORES))
    assert sizes.num_stages >= 2
