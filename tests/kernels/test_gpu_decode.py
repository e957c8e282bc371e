"""The decode kernel for GPUs, simulated, against the oracle, and how it cuts contexts."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import gpu_decode
from pallas_kernels.ragged_paged_attention.rows import find_rows
from pallas_kernels.ragged_paged_attention.specs import MODEL_SHAPES, AttentionCall
from tests.kernels import gpu_simulator
from tests.kernels.cases import Config, RowPlan, make_case
from tests.kernels.gpu_calls import attention_call, gpu_call, rows_of

# Multiprocessors: contexts are cut, and the simulator runs few thread blocks.
_NUM_CORES = 4
_CAPACITY = 131_072  # tokens that a row's table has pages for


# Every head dim and dtype, groups of 1 to 16, features, pages within a block and blocks within a
# page. Rows take several blocks and several chunks.
CONFIGS = {
    "gqa4-h128-window-soft-cap-sinks": dict(
        num_heads=8, head_dim=128, sliding_window=400, soft_cap=2.0, has_sinks=True
    ),
    "mha-h96-e4m3-page64": dict(
        num_heads=2, head_dim=96, page_size=64, kv_dtype="float8_e4m3fn", has_scales=True
    ),
    "mqa16-h256-int8-page256": dict(
        num_heads=16, num_kv_heads=1, head_dim=256, page_size=256, kv_dtype="int8"
    ),
    "gqa3-h80-f16-page48": dict(
        num_heads=6, head_dim=80, page_size=48, q_dtype="float16", kv_dtype="float16"
    ),
    "gqa2-h64-e5m2": dict(kv_dtype="float8_e5m2", has_scales=True),
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_matches_oracle(changes):
    config = Config(*(4, 2, 64, 16, "bfloat16", "bfloat16"), max_tokens=8, max_rows=5, chip="h100")
    config = dataclasses.replace(config, **changes)
    config = dataclasses.replace(config, pages_per_row=-(-512 // config.page_size))
    plans = [RowPlan(1, 500), RowPlan(3, 40), RowPlan(1, 0), RowPlan(0, 9), RowPlan(1, 130)]
    case = make_case(config, plans, seed=1)
    call = attention_call(config, _NUM_CORES)
    assert gpu_decode.unsupported_reason(call) is None
    chunks = gpu_decode.plan(call, rows_of(case))
    with gpu_simulator.simulate():
        out = np.asarray(gpu_decode.decode_rows(gpu_call(case, _NUM_CORES), chunks))
    expected = case.expected()
    for row, plan in enumerate(plans):
        if plan.q_len == 1:
            token = case.cu_q_lens[row]
            error = np.abs(out[row] - expected.out[token])
            assert (error <= expected.tolerance[token]).all(), f"row {row}: {np.nanmax(error)}"


def plan(kv_lens: list[int], call: AttentionCall) -> gpu_decode.Chunks:
    """How the contexts of decode rows are cut; rows of no context are padding."""
    lens = jnp.asarray(kv_lens, jnp.int32)
    tables = jnp.zeros((len(kv_lens), _CAPACITY // call.layout.page_size), jnp.int32)
    cu_q_lens = jnp.cumsum(jnp.append(0, jnp.minimum(lens, 1)), dtype=jnp.int32)
    rows = find_rows(call.layout, len(kv_lens), 1, tables, lens, cu_q_lens, len(kv_lens))
    return jax.tree.map(np.asarray, gpu_decode.plan(call, rows))


@pytest.mark.parametrize("window", [None, 1, 1000])
@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    kv_lens=st.lists(
        st.one_of(st.just(0), st.integers(1, 300), st.integers(1, _CAPACITY)),
        min_size=16,
        max_size=16,
    )
)
def test_chunks_are_every_live_token_once(window, kv_lens):
    call = MODEL_SHAPES["Llama-3-8B"].call(CHIPS["h100"])
    call = dataclasses.replace(call, sliding_window=window)
    sizes = gpu_decode.block_sizes(call)
    assert sizes is not None
    chunks = plan(kv_lens, call)
    longest = 0
    for row, kv_len in enumerate(kv_lens):
        here = range(chunks.first[row], chunks.first[row] + chunks.num[row])
        visible = max(kv_len - window, 0) if window else 0
        at = visible // sizes.unit * sizes.unit  # what a copy brings is of one page
        for chunk in here:
            assert (chunks.row[chunk], chunks.begin[chunk]) == (row, at)
            assert chunks.visible[chunk] == visible
            assert chunks.end[chunk] > max(at, visible), "a chunk whose softmax is empty"
            at = chunks.end[chunk]
            longest = max(longest, at - chunks.begin[chunk])
        assert at == kv_len or kv_len == 0
    assert (chunks.begin >= chunks.end).sum() == len(chunks.begin) - chunks.num.sum()
    # All thread blocks that fit the chip at once, and one more a row: none has much more than its
    # share of the context.
    slots = sizes.per_core * call.chip.num_cores // call.layout.num_kv_heads
    share = sum(kv_lens) / slots + 2 * sizes.tokens
    assert longest <= max(share, gpu_decode._MIN_CHUNK * sizes.tokens)


def test_nothing_is_read_past_the_end_of_a_table():
    call = MODEL_SHAPES["Llama-3-8B"].call(CHIPS["h100"])
    assert plan([_CAPACITY + 1] * 16, call).end.max() == _CAPACITY
