"""Every implementation of ragged paged attention against the oracle."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import KVCache, KVCacheLayout, ragged_paged_attention
from tests.kernels import harness
from tests.kernels.cases import (
    CONFIGS,
    SIMULATED_CONFIGS,
    Config,
    RowPlan,
    edge_plans,
    make_case,
    row_plans,
)
from tests.native import needs_compiler, needs_tiles

# (implementation, chip whose layout it reads).
SETUPS = {
    "reference": ("reference", "cpu"),
    "xla": ("xla", "cpu"),
    "xla-tpu": ("xla", "v6e"),
}
# In C: caches that are not of 8 bits, nor of float16.
IN_C = [name for name, config in CONFIGS.items() if config.kv_dtype in ("float32", "bfloat16")]
# (setup, config): what each simulated implementation meets here. Those of a GPU take longest.
SIMULATED = [
    *((("tpu", "v6e"), name) for name in SIMULATED_CONFIGS if name != "everything-e4m3-bf16"),
    (("gpu", "b200"), "gqa3-h64-bf16"),
    (("gpu", "h100"), "everything-e4m3-bf16"),
]


def check(implementation: str, config: Config, plans: list[RowPlan], seed: int) -> None:
    case = make_case(config, plans, seed)
    harness.check(case, case.expected(), harness.run(implementation, case))


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matches_oracle_on_any_ragged_mix(setup, config, subtests):
    check_config(setup, config, subtests, num_mixes=10)


@needs_compiler
@pytest.mark.parametrize("name", IN_C)
def test_matches_oracle_in_c(name, subtests):
    check_config(("cpu", "cpu"), CONFIGS[name], subtests, num_mixes=20)


# Simulators multiply what is in dead slots, too.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("setup", "name"), SIMULATED, ids=[f"{s[0]}-{n}" for s, n in SIMULATED])
def test_matches_oracle_in_simulation(setup, name, subtests):
    check_config(setup, SIMULATED_CONFIGS[name], subtests, num_mixes=2)


def check_config(setup, config, subtests, num_mixes):
    implementation, chip = setup
    config = dataclasses.replace(config, chip=chip)
    for seed, (name, plans) in enumerate(edge_plans(config).items()):
        with subtests.test(name):
            check(implementation, config, plans, seed)

    @hypothesis.settings(max_examples=num_mixes, deadline=None)
    @hypothesis.given(plans=row_plans(config), seed=st.integers(0, 2**32 - 1))
    def check_any(plans, seed):
        check(implementation, config, plans, seed)

    check_any()
    assert harness.num_traces[implementation, config] == 1


@needs_tiles
@pytest.mark.parametrize("window", [None, 100])
def test_tiles_attend_the_same_however_a_prompt_is_cut(window):
    num_tokens, num_heads, page_size = 200, 8, 16
    layout = KVCacheLayout.for_platform("cpu", 1, 2, 64, "bfloat16", page_size)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((num_tokens, n, 64)), jnp.bfloat16)
        for n in (num_heads, 2, 2)
    )
    tables = jnp.arange(1, 14, dtype=jnp.int32)[None]

    def attend(kv_cache: KVCache, begin: int) -> tuple[jax.Array, KVCache]:
        return ragged_paged_attention(
            *(q[begin:], k[begin:], v[begin:], kv_cache, 0, tables),
            *(jnp.array([num_tokens]), jnp.array([0, num_tokens - begin]), 1),
            layout=layout,
            chip=CHIPS["cpu"],
            scale=0.125,
            sliding_window=window,
            implementation="cpu",
        )

    empty = KVCache(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in layout.shape(14)))
    together, kv_cache = attend(empty, 0)
    for num_last in (1, 2, 12, 33, 100):
        out, _ = attend(kv_cache, num_tokens - num_last)
        assert np.array_equal(out, together[-num_last:]), num_last
