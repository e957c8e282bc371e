"""The TPU kernel for prefill, simulated with race detection, on rows of several query tiles."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import KVCache, tpu_prefill_tile
from pallas_kernels.ragged_paged_attention.layout import from_logical, join_heads, to_logical
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from pallas_kernels.ragged_paged_attention.tpu_common import TpuCall, factors, pack_tables
from pallas_kernels.ragged_paged_attention.tpu_prefill import PrefillSizes, prefill
from tests.kernels import harness, tpu_simulator
from tests.kernels.cases import Case, Config, RowPlan, make_case

_SIZES = PrefillSizes(num_queries=16, num_keys=256)

# Longer rows than those of the common suite: several tiles of queries, several blocks of keys.
CONFIGS = {
    "gqa4": Config(8, 2, 128, 16, "bfloat16", "bfloat16", max_tokens=48, pages_per_row=20),
    "window": Config(4, 1, 64, 16, sliding_window=100, max_tokens=48, pages_per_row=20),
}


@functools.cache
def _compiled(config: Config, scale: float) -> Callable[..., tuple[jax.Array, KVCache]]:
    layout = config.layout
    call = AttentionCall(
        *(layout, CHIPS[config.chip], config.num_heads, jnp.dtype(config.q_dtype)),
        *(config.sliding_window, config.soft_cap, config.has_sinks, config.has_scales),
    )

    @jax.jit
    def run(kv_cache: KVCache, q, k, v, tables, kv_lens, cu_q_lens, sinks, k_scale, v_scale, ints):
        score_factors, out_factors = factors(call, scale, k_scale, v_scale)
        tpu_call = TpuCall(
            call=call,
            layer=ints[:1],
            num_rows=ints[1:],
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            tables=pack_tables(tables, config.num_pages),
            q=q,
            k_new=join_heads(layout, layout.encode(k, k_scale)),
            v_new=join_heads(layout, layout.encode(v, v_scale)),
            sinks=sinks,
            score_factors=score_factors,
            out_factors=out_factors,
        )
        return prefill(tpu_call, jnp.zeros(q.shape, q.dtype), kv_cache, _SIZES)

    return run


def _run(case: Case) -> harness.Result:
    layout = case.config.layout
    arrays = (
        *(case.q, case.k, case.v, case.block_tables, case.kv_lens, case.cu_q_lens),
        *(case.options.sinks, case.k_scale, case.v_scale),
        np.array([case.layer, len(case.rows)], np.int32),
    )
    with tpu_simulator.simulate():
        out, kv_cache = _compiled(case.config, case.options.scale)(
            from_logical(layout, jnp.asarray(case.k_before), jnp.asarray(case.v_before)),
            *jax.tree.map(jnp.asarray, arrays),
        )
    k, v = to_logical(layout, kv_cache)
    return harness.Result(np.asarray(out), np.asarray(k), np.asarray(v))


def _plans(config: Config) -> dict[str, list[RowPlan]]:
    capacity = config.pages_per_row * config.page_size
    longest = min(config.max_tokens, capacity)
    return {
        "no rows": [],
        "from the start, rows of none, all tokens": [
            RowPlan(0, 3),
            RowPlan(longest - 5, 0),
            RowPlan(0, 0),
            RowPlan(5, capacity // 2 - 3),
        ],
        "to the end": [RowPlan(2, 1), RowPlan(longest - 7, capacity - longest + 7)],
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matches_oracle(config, subtests, monkeypatch):
    monkeypatch.setattr(tpu_prefill_tile, "_EDGE_KEYS", 128)  # a block is two parts
    config = dataclasses.replace(config, chip="v6e")
    for seed, (name, plans) in enumerate(_plans(config).items()):
        with subtests.test(name):
            case = make_case(config, plans, seed)
            harness.check(case, case.expected(), _run(case))
