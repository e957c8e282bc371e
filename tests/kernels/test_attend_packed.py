"""Attention to what a projection gives: unpacked, turned, written and attended to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import (
    KVCache,
    KVCacheLayout,
    RopeTables,
    attend_packed,
    plan_attention,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.rope import apply_rope
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from tests.native import IN_C, needs_tiles

CPU = CHIPS["cpu"]
PAGE_SIZE, NUM_PAGES, MAX_TOKENS = 16, 30, 120
# Rows of (tokens before, new tokens); a row without new ones, and padding after all.
ROWS = [(37, 1), (0, 70), (5, 0), (16, 16), (159, 1)]


def numpy_rope(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64, by complex numbers; x [T, N, H]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000.0 ** (np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


class Packed:
    """Arguments of one call, and what comes of them by the definition."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, kv_dtype: str):
        rng = np.random.default_rng(num_heads * head_dim)
        self.layout = KVCacheLayout.for_platform(
            "cpu", 2, num_kv_heads, head_dim, kv_dtype, PAGE_SIZE
        )
        group = num_heads // num_kv_heads
        shape = (MAX_TOKENS, num_kv_heads, group + 2, head_dim)
        self.qkv = jnp.asarray(rng.standard_normal(shape), dtype)
        lens = np.array([new for _, new in ROWS])
        num_live = int(lens.sum())
        positions = np.zeros(MAX_TOKENS)
        positions[:num_live] = np.concatenate([b + np.arange(new) for b, new in ROWS])
        angles = positions[:, None] / 10_000.0 ** (np.arange(head_dim // 2) / (head_dim // 2))
        tables = RopeTables(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)))
        self.tables = tables
        pages = iter(rng.permutation(np.arange(1, NUM_PAGES)))
        block_tables = np.full((len(ROWS) + 1, 10), 10**6, np.int32)
        for row, (before, new) in enumerate(ROWS):
            for page in range(-(-(before + new) // PAGE_SIZE)):
                block_tables[row, page] = next(pages)
        kv_lens = np.array([*(before + new for before, new in ROWS), 0], np.int32)
        cu_q_lens = np.concatenate([[0], np.cumsum(lens), [num_live]]).astype(np.int32)
        where = (block_tables, kv_lens, cu_q_lens)
        self.where = (*(jnp.asarray(a) for a in where), len(ROWS))
        self.kv_cache = KVCache(
            *(
                jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
                for leaf in self.layout.shape(NUM_PAGES)
            )
        )
        x64 = np.asarray(self.qkv, np.float64)
        q = numpy_rope(x64[:, :, :-2].reshape(MAX_TOKENS, num_heads, head_dim), positions)
        self.q, self.v = jnp.asarray(q, dtype), self.qkv[:, :, -1]
        self.k = jnp.asarray(numpy_rope(x64[:, :, -2], positions), dtype)

    def run(self, implementation: str, **options):
        @functools.partial(jax.jit, donate_argnums=2)
        def attend(qkv, tables, kv_cache, where):
            return attend_packed(
                *(qkv, tables, kv_cache, jnp.int32(1), *where),
                layout=self.layout,
                chip=CPU,
                scale=0.125,
                implementation=implementation,
                **options,
            )

        copied = jax.tree.map(jnp.copy, self.kv_cache)
        return attend(self.qkv, self.tables, copied, self.where)

    def expected(self):
        return ragged_paged_attention(
            *(self.q, self.k, self.v, self.kv_cache, 1, *self.where),
            layout=self.layout,
            chip=CPU,
            scale=0.125,
            implementation="reference",
        )


@pytest.mark.parametrize("implementation", ["reference", "xla", IN_C])
@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype"),
    [
        ((9, 3, 64), "bfloat16", "bfloat16"),
        ((4, 4, 16), "float32", "float32"),
        ((8, 1, 48), "float32", "bfloat16"),
        ((6, 2, 80), "bfloat16", "float32"),
    ],
)
def test_is_attention_to_what_is_turned(implementation, shape, dtype, kv_dtype):
    case = Packed(*shape, dtype, kv_dtype)
    out, kv_cache = case.run(implementation)
    want, want_cache = case.expected()
    # Turned entries differ by an ulp where they are rounded; a softmax has weights of one in all.
    tolerance = 0.04 if "bfloat16" in (dtype, kv_dtype) else 2e-5
    np.testing.assert_allclose(
        *(np.asarray(a, np.float32) for a in (out, want)), rtol=0, atol=tolerance
    )
    for got, wanted, before in zip(kv_cache, want_cache, case.kv_cache, strict=True):
        got, wanted, before = (np.asarray(a, np.float32) for a in (got, wanted, before))
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=tolerance / 10)
        is_same = (got == before).reshape(*got.shape[:3], -1).all(axis=-1)
        assert is_same[0].all()  # the other layer
        num_new = sum(new for _, new in ROWS)
        assert (~is_same[1, 1:]).sum() == num_new  # and page 0 may hold anything
    assert out.dtype == case.qkv.dtype


@needs_tiles
def test_tokens_have_the_same_results_among_others():
    """Not by a bit does it matter how many tokens a thread takes."""
    case = Packed(9, 3, 64, "bfloat16", "bfloat16")
    together, _ = case.run("cpu")
    block_tables, kv_lens, _, _ = case.where
    alone, _ = attend_packed(
        *(case.qkv[:1], RopeTables(*(t[:1] for t in case.tables)), case.kv_cache, 1),
        *(block_tables[:1], kv_lens[:1], jnp.array([0, 1], jnp.int32), 1),
        layout=case.layout,
        chip=CPU,
        scale=0.125,
        implementation="cpu",
    )
    assert np.array_equal(alone[0], together[0])


def test_the_plan_is_that_of_the_op():
    case = Packed(4, 4, 16, "float32", "float32")
    call = AttentionCall(case.layout, CPU, 4, case.qkv.dtype)
    plan = plan_attention(call, MAX_TOKENS, NUM_PAGES, *case.where)
    np.testing.assert_array_equal(case.run("auto", plan=plan)[0], case.run("auto")[0])
    other = plan_attention(call, MAX_TOKENS - 1, NUM_PAGES, *case.where)
    with pytest.raises(ValueError, match="the plan is for"):
        case.run("auto", plan=other)


@pytest.mark.parametrize("implementation", ["reference", "xla", IN_C])
def test_what_does_not_fit_is_an_error(implementation):
    case = Packed(4, 2, 16, "float32", "float32")
    whole, tables = case.qkv, case.tables
    for tables_like in (lambda t: t[:1], lambda t: t[:, :4], lambda t: t.astype(jnp.bfloat16)):
        case.tables = RopeTables(*map(tables_like, tables))
        with pytest.raises((ValueError, TypeError), match=r"cos|Type"):
            case.run(implementation)
    case.tables = tables
    for qkv in (whole[:, :1], whole[:, :, :2], jnp.concatenate([whole, whole], axis=1)):
        case.qkv = qkv
        with pytest.raises(ValueError, match="KV heads"):
            case.run(implementation)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_each_of_q_k_and_v_keeps_its_precision(dtypes):
    q_dtype, kv_dtype = dtypes
    layout = KVCacheLayout.for_platform("cpu", 1, 1, 16, "float32", PAGE_SIZE)
    q, k, v = (
        jnp.full((1, 1, 16), value, dtype)
        for value, dtype in ((1.0, q_dtype), (1.0009765, kv_dtype), (60_001.0, kv_dtype))
    )
    empty = KVCache(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in layout.shape(2)))
    out, kv_cache = ragged_paged_attention(
        *(q, k, v, empty, 0, jnp.array([[1]]), jnp.array([1]), jnp.array([0, 1]), 1),
        layout=layout,
        chip=CPU,
        scale=0.25,
        implementation=IN_C,
    )
    assert np.array_equal(kv_cache.k[0, 1, 0], k[0].astype(jnp.float32))
    assert np.array_equal(kv_cache.v[0, 1, 0], v[0].astype(jnp.float32))
    assert out.dtype == q.dtype


def test_pairs_are_a_half_apart():
    x = jnp.zeros((1, 1, 8)).at[0, 0, 1].set(1.0)
    tables = RopeTables(jnp.full((1, 4), 0.6), jnp.full((1, 4), 0.8))
    turned = np.asarray(apply_rope(x, tables))[0, 0]
    np.testing.assert_allclose(turned, [0, 0.6, 0, 0, 0, 0.8, 0, 0], atol=1e-7)
