"""What compiled calls cost and which shapes they take: no copy of the cache, no dense context."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import (
    IMPLEMENTATIONS,
    AttentionCall,
    KVCache,
    KVCacheLayout,
    ragged_paged_attention,
    unsupported_reason,
)
from pallas_kernels.ragged_paged_attention.specs import MODEL_SHAPES

LAYOUT = KVCacheLayout.for_platform("cpu", 3, 2, 64, "bfloat16", 8)
CPU_IMPLEMENTATIONS = [
    name
    for name in IMPLEMENTATIONS
    if unsupported_reason(name, AttentionCall(LAYOUT, CHIPS["cpu"], 4, LAYOUT.dtype)) is None
]
FAST_IMPLEMENTATIONS = [name for name in CPU_IMPLEMENTATIONS if name != "reference"]


def _memory(
    implementation: str, layout: KVCacheLayout, num_pages: int, pages_per_row: int = 4
) -> tuple[int, int]:
    """Temporary and aliased bytes of a step that calls the op once a layer, as models do."""
    num_tokens, num_rows, num_heads = 16, 4, 2 * layout.num_kv_heads

    def step(kv_cache: KVCache, q, k, v, block_tables, kv_lens, cu_q_lens, rows):
        def one_layer(carry, layer):
            q, kv_cache = carry
            return ragged_paged_attention(
                *(q, k, v, kv_cache, layer, block_tables, kv_lens, cu_q_lens, rows),
                layout=layout,
                chip=CHIPS["cpu"],
                scale=0.1,
                implementation=implementation,
            ), None

        (out, kv_cache), _ = jax.lax.scan(
            one_layer, (q, kv_cache), jnp.arange(layout.num_layers, dtype=jnp.int32)
        )
        return out, kv_cache

    def array(*shape: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    new = array(num_tokens, layout.num_kv_heads, layout.head_dim, dtype=jnp.bfloat16)
    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower(
            layout.shape(num_pages),
            array(num_tokens, num_heads, layout.head_dim, dtype=jnp.bfloat16),
            *(new, new),
            *(array(num_rows, pages_per_row), array(num_rows), array(num_rows + 1), array()),
        )
        .compile()
    )
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes, analysis.alias_size_in_bytes


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        (name, dtype)
        for name in CPU_IMPLEMENTATIONS
        for dtype in ("bfloat16", "int8", "float8_e4m3fn")
        if (name, dtype) == ("cpu", "bfloat16") or name != "cpu"
    ],
)
def test_cache_is_never_copied(implementation, dtype):
    layout = dataclasses.replace(LAYOUT, dtype=jnp.dtype(dtype))
    few_temp, few_alias = _memory(implementation, layout, num_pages=64)
    many_temp, many_alias = _memory(implementation, layout, num_pages=512)
    assert (few_alias, many_alias) == (64 * layout.bytes_per_page, 512 * layout.bytes_per_page)
    assert few_temp == many_temp


@pytest.mark.parametrize("implementation", FAST_IMPLEMENTATIONS)
def test_no_context_is_stored_densely(implementation):
    layout = KVCacheLayout.for_platform("cpu", 1, 2, 64, "bfloat16", 8)
    narrow, _ = _memory(implementation, layout, num_pages=64, pages_per_row=32)
    wide, _ = _memory(implementation, layout, num_pages=64, pages_per_row=1024)
    # The block table itself (4 rows of int32) may be copied a few times; the keys and values of
    # one such context, or its scores for one head, would be more.
    assert wide - narrow <= 4 * (4 * 1024 * 4)
    assert (1024 - 32) * layout.bytes_per_page > 4 * (4 * 1024 * 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_takes_the_shapes_of_real_models(implementation, chip, model):
    call = MODEL_SHAPES[model].call(chip)
    if unsupported_reason(implementation, call) is not None:
        assert implementation not in CPU_IMPLEMENTATIONS or chip.platform != "cpu"
        return
    layout, num_tokens, num_rows = call.layout, 512, 64

    def array(*shape: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    q = array(num_tokens, call.num_heads, layout.head_dim, dtype=call.q_dtype)
    new = array(num_tokens, layout.num_kv_heads, layout.head_dim, dtype=call.q_dtype)
    cache = layout.shape(1024)
    out, kv_cache = jax.eval_shape(
        lambda *arrays: ragged_paged_attention(
            *arrays, layout=layout, chip=chip, scale=0.1, implementation=implementation
        ),
        *(q, new, new, cache, array(), array(num_rows, 256), array(num_rows)),
        *(array(num_rows + 1), array()),
    )
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert kv_cache == cache


def test_layout_is_a_static_argument():
    layout = KVCacheLayout.for_platform("cpu", 1, 1, 8, "float32", 4)
    same = KVCacheLayout.for_platform("cpu", 1, 1, 8, jnp.float32, 4)
    traces = []

    @jax.jit(static_argnames="layout")
    def f(x, layout):
        traces.append(layout)
        return x + layout.page_size

    f(1, layout=layout)
    f(1, layout=same)
    assert len(traces) == 1
    f(1, layout=dataclasses.replace(layout, page_size=8))
    assert len(traces) == 2
