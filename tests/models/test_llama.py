"""The Llama family: against a NumPy definition, and against transformers' own logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from msgspec.structs import replace

from jaxserve.checkpoint import load_model_info
from jaxserve.config import ModelInfo
from jaxserve.models import llama
from jaxserve.models.layers import matmul_by_xla, rope_frequencies
from jaxserve.models.registry import Model, model_for
from jaxserve.worker.sharding import make_mesh
from jaxserve.worker.weights import load_params
from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import (
    KVCache,
    KVCacheLayout,
    RopeTables,
    attend_packed,
)
from pallas_kernels.ragged_paged_attention.layout import zeros
from pallas_kernels.ragged_paged_attention.rope import unpack_and_rotate
from tests.checkpoint.gguf_files import GOLDENS, TINY_LLAMA, llama3_factors
from tests.worker.tiny import INFO, random_params

# A logit of tiny_llama ends a chain of 2 layers x 7 products and the LM head. A sum of 128 float32
# terms is off by about sqrt(128) * 2^-24 of what it sums, below 10 here, and 15 such errors add up
# at random. The goldens hold as much again, and are rounded to 5 decimals. (The angles of rope are
# off by less: 200 * 2^-24 rad at the last position, in scores only.)
GOLDEN_TOLERANCE = 2 * (15 * 128) ** 0.5 * 2**-24 * 10 + 5e-6

# --- the whole model, as transformers computes it ------------------------------------------------


def test_tiny_llama_has_the_logits_of_transformers():
    """Three sequences side by side, from sharded bfloat16 weights, with scaled rope."""
    info = load_model_info(TINY_LLAMA)
    params = load_params(info, jnp.float32, make_mesh(jax.local_devices()[:1]))
    sequences = json.loads((GOLDENS / "tiny_llama.json").read_text())["sequences"]
    lens = np.array([len(s["ids"]) for s in sequences], np.int32)
    page_size, pages_per_row = 16, -(-max(lens) // 16)
    layout = KVCacheLayout.for_platform(
        "cpu", info.num_layers, info.num_kv_heads, info.head_dim, "float32", page_size
    )
    block_tables = 1 + np.arange(len(lens) * pages_per_row, dtype=np.int32)
    block_tables = block_tables.reshape(len(lens), pages_per_row)
    cu_q_lens = np.cumsum([0, *lens], dtype=np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])

    def attend(qkv, tables, kv_cache, layer):
        return attend_packed(
            qkv,
            tables,
            kv_cache,
            layer,
            jnp.asarray(block_tables),
            jnp.asarray(lens),
            jnp.asarray(cu_q_lens),
            len(lens),
            layout=layout,
            chip=CHIPS["cpu"],
            scale=info.head_dim**-0.5,
            implementation="reference",
        )

    @jax.jit
    def run(
        params: dict[str, Array], token_ids: Array, positions: Array, kv_cache: KVCache
    ) -> Array:
        hidden, _ = llama.forward(params, info, token_ids, positions, kv_cache, attend)
        return llama.logits(params, info, hidden[cu_q_lens[1:] - 1])

    token_ids = np.concatenate([s["ids"] for s in sequences]).astype(np.int32)
    got = np.asarray(run(params, token_ids, positions, zeros(layout, 1 + block_tables.size)))
    want = np.array([s["last_logits"] for s in sequences])
    assert got.dtype == np.float32
    assert np.abs(want).max() < 10
    np.testing.assert_allclose(got, want, rtol=0, atol=GOLDEN_TOLERANCE)


# --- one layer after the other, with attention replaced by something that shows its inputs -------


def numpy_logits(info: ModelInfo, p: dict[str, np.ndarray], ids, positions) -> np.ndarray:
    """float64; the same stand-in for attention as `shown`."""
    p = {name: value.astype(np.float64) for name, value in p.items()}
    group = info.num_heads // info.num_kv_heads

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + info.rms_norm_eps) * weight

    def rotate(vector, position):
        half = info.head_dim // 2
        turned = vector[:half] + 1j * vector[half:]
        angles = [position / info.rope_theta ** (2 * i / info.head_dim) for i in range(half)]
        turned = turned * np.exp(1j * np.array(angles))
        return np.concatenate([turned.real, turned.imag])

    x = p["embed"][ids]
    for i in range(info.num_layers):
        w = {name: value[i] for name, value in p.items() if name.startswith("layers.")}
        h = norm(x, w["layers.attn_norm"])
        attended = np.zeros((len(ids), info.num_heads, info.head_dim))
        for t, position in enumerate(positions):
            for n in range(info.num_heads):
                head, member = divmod(n, group)
                packed = w["layers.qkv"][head] @ h[t]
                if info.attention_bias:
                    packed = packed + w["layers.qkv_bias"][head]
                q, k = rotate(packed[member], position), rotate(packed[group], position)
                attended[t, n] = q * k + (1 + i) * packed[group + 1]
        x = x + attended.reshape(len(ids), -1) @ w["layers.attn_out"].T
        if info.attention_bias:
            x = x + w["layers.attn_out_bias"]
        h = norm(x, w["layers.mlp_norm"])
        gate, up = (h @ w["layers.gate_up"][0, j].T for j in range(2))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["layers.down"].T
    head = p["embed" if info.tie_word_embeddings else "lm_head"]
    return norm(x, p["final_norm"]) @ head.T


def shown(qkv: Array, tables: RopeTables, kv_cache: KVCache, layer: Array) -> tuple[Array, KVCache]:
    """In place of attention: q * k + (1 + layer) * v, head by head; keeps v in the cache."""
    q, k, v = unpack_and_rotate(qkv, tables)
    group = q.shape[1] // k.shape[1]
    k_of_q, v_of_q = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    kept = kv_cache.v.at[layer].set(v)
    return q * k_of_q + (1 + layer).astype(q.dtype) * v_of_q, KVCache(kv_cache.k + 1, kept)


@pytest.mark.parametrize(("tied", "bias"), [(False, True), (True, False)])
def test_forward_is_the_definition(tied, bias):
    info = replace(INFO, tie_word_embeddings=tied, attention_bias=bias)
    params = random_params(info, seed=5)
    ids = np.array([3, 60, 3, 11, 0], np.int32)
    positions = np.array([0, 1, 7, 31, 2], np.int32)
    cache = KVCache(jnp.zeros(()), jnp.full((info.num_layers, len(ids), 2, 8), jnp.nan))

    @jax.jit
    def run(
        params: dict[str, Array], ids: Array, positions: Array, cache: KVCache
    ) -> tuple[Array, KVCache]:
        hidden, kv_cache = llama.forward(params, info, ids, positions, cache, shown)
        return llama.logits(params, info, hidden), kv_cache

    got, kv_cache = run(params, ids, positions, cache)
    want = numpy_logits(info, jax.tree.map(np.asarray, params), ids, positions)
    # 15 sums of at most 48 terms, each off by about sqrt(48) * 2^-24 of what it sums.
    tolerance = 15**0.5 * 48**0.5 * 2**-24 * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=tolerance)
    assert float(kv_cache.k) == info.num_layers  # every layer had it once
    assert np.isfinite(np.asarray(kv_cache.v)).all()  # each at its own index


def test_types_stay_what_they_are():
    """bfloat16 inside, float32 logits; nothing is computed."""
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16)
        for name, spec in llama.param_specs(INFO).items()
    }
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    cache = KVCache(*[jax.ShapeDtypeStruct((2, 5, 2, 8), jnp.bfloat16)] * 2)

    def run(params, ids, positions, cache):
        hidden, cache = llama.forward(params, INFO, ids, positions, cache, shown)
        return hidden, cache, llama.logits(params, INFO, hidden)

    hidden, cache, logits = jax.eval_shape(run, params, ids, ids, cache)
    assert (hidden.shape, hidden.dtype) == ((5, INFO.hidden_size), jnp.bfloat16)
    assert {leaf.dtype for leaf in cache} == {jnp.dtype(jnp.bfloat16)}
    assert (logits.shape, logits.dtype) == ((5, INFO.vocab_size), jnp.float32)


@pytest.mark.parametrize(("dtype", "is_exact"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_only_float32_products_ask_for_full_precision(dtype, is_exact):
    """Accelerators round float32 factors unless they are told not to; this host never does."""
    x, weights = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 8), (1, 5, 8)))
    lowered = jax.jit(matmul_by_xla).lower(x, weights, 0)
    assert ("precision = [HIGHEST, HIGHEST]" in lowered.as_text()) == is_exact
    assert lowered.out_info.dtype == jnp.float32


# --- parameters and rope -------------------------------------------------------------------------


def test_parameters_name_an_axis_for_each_dimension():
    assert isinstance(model_for(INFO), Model)
    info = replace(INFO, attention_bias=True)
    sizes = {
        "layers": info.num_layers,
        "embed": info.hidden_size,
        "mlp": info.intermediate_size,
        "vocab": info.vocab_size,
        "kv_heads": info.num_kv_heads,
        "heads": info.num_heads * info.head_dim,
        "parts": 1,
    }
    specs = llama.param_specs(info)
    for name, spec in specs.items():
        assert len(spec.axes) == len(spec.shape), name
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            assert axis is None or sizes[axis] == size, name
        assert spec.is_stacked == name.startswith("layers.")
        assert all(("{i}" in source) == spec.is_stacked for source in spec.sources)
    sources = [source for spec in specs.values() for source in spec.sources]
    assert len(sources) == len(set(sources))
    tied = llama.param_specs(replace(info, tie_word_embeddings=True))
    assert specs.keys() - tied.keys() == {"lm_head"}


def test_an_unknown_architecture_is_ours_to_prevent():
    with pytest.raises(AssertionError, match="GPT2LMHeadModel"):
        model_for(replace(INFO, architecture="GPT2LMHeadModel"))


def test_rope_frequencies():
    info = replace(INFO, rope_theta=500.0, head_dim=16)
    plain = np.array([500.0 ** (-i / 16) for i in range(0, 16, 2)])
    for scaling in ({}, {"rope_type": "default"}):
        got = rope_frequencies(replace(info, rope_scaling=scaling))
        np.testing.assert_allclose(got, plain, rtol=1e-7)
    linear = replace(info, rope_scaling={"rope_type": "linear", "factor": 3.0})
    np.testing.assert_allclose(rope_frequencies(linear), plain / 3, rtol=1e-7)
    # Of the same theta and head size; some frequencies are kept, some divided, some between.
    factors = llama3_factors()
    assert {1.0, 4.0} < set(factors.tolist())
    scaled = replace(info, rope_scaling=load_model_info(TINY_LLAMA).rope_scaling)
    np.testing.assert_allclose(rope_frequencies(scaled), plain / factors, rtol=2e-7)
    with pytest.raises(AssertionError, match="yarn"):
        rope_frequencies(replace(info, rope_scaling={"rope_type": "yarn"}))
