"""KV cache layouts: sizes, the way to logical axes and back, and what quantized caches store."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import KVCacheLayout
from pallas_kernels.ragged_paged_attention.layout import (
    CACHE_DTYPES,
    PLATFORMS,
    from_logical,
    to_logical,
    zeros,
)
from tests.kernels import harness
from tests.kernels.cases import CONFIGS, RowPlan, make_case

FLOAT8_DTYPES = ["float8_e4m3fn", "float8_e5m2"]


def _random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_logical_round_trip_keeps_every_bit(platform, dtype):
    layout = KVCacheLayout.for_platform(platform, 2, 3, 8, dtype, 4)
    shape = (2, 5, 4, 3, 8)
    k, v = _random_bits(shape, dtype, 0), _random_bits(shape, dtype, 1)
    kv_cache = from_logical(layout, jnp.asarray(k), jnp.asarray(v))
    for leaf, expected in zip(kv_cache, layout.shape(5), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
    for got, want in zip(to_logical(layout, kv_cache), (k, v), strict=True):
        assert got.dtype == dtype
        assert np.asarray(got).tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_bytes_per_page_is_what_a_page_takes(platform, dtype):
    layout = KVCacheLayout.for_platform(platform, 2, 3, 8, dtype, 4)
    num_bytes = [sum(leaf.nbytes for leaf in zeros(layout, pages)) for pages in (3, 4)]
    assert layout.bytes_per_page == num_bytes[1] - num_bytes[0] == num_bytes[0] // 3
    assert layout.num_pages(zeros(layout, 3)) == 3


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "padded_head_dim", "token_width"),
    [
        *((8, 128, 128, 1024), (3, 64, 64, 256), (1, 64, 64, 128), (2, 80, 128, 256)),
        *((1, 256, 256, 256), (4, 96, 128, 512), (1, 8, 8, 128), (2, 192, 256, 512)),
    ],
)
def test_a_tpu_pads_heads_to_lanes(num_kv_heads, head_dim, padded_head_dim, token_width):
    layout = KVCacheLayout.for_platform("tpu", 2, num_kv_heads, head_dim, "bfloat16", 16)
    assert (layout.padded_head_dim, layout.token_width) == (padded_head_dim, token_width)
    assert layout.shape(5).k.shape == (2, 5, 16, token_width)
    assert layout.shape(5).k.shape[layout.heads_axis] == token_width


def test_from_logical_refuses_another_dtype():
    layout = KVCacheLayout.for_platform("cpu", 1, 1, 8, "bfloat16", 4)
    k = jnp.zeros((1, 2, 4, 1, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="V is float32"):
        from_logical(layout, k, k.astype(jnp.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"platform": "abacus"}, "'abacus' is not one of cpu, gpu, tpu"),
        ({"dtype": "int32"}, "int32 is not one of float32"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"page_size": 0}, "page_size is 0"),
    ],
)
def test_for_platform_refuses(changes, message):
    fits: dict[str, Any] = dict(
        platform="cpu", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4
    )
    KVCacheLayout.for_platform(**fits)
    with pytest.raises(ValueError, match=message):
        KVCacheLayout.for_platform(**fits | changes)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("axes", ["LPKSH", "LKPSH", "LKSPH", "LSPKH", "LPSX"])
def test_tokens_are_written_and_read_where_the_axes_say(axes, dtype):
    layout = KVCacheLayout.for_platform("cpu", 2, 3, 8, dtype, 4)
    layout = dataclasses.replace(layout, axes=axes)
    k, v = (_random_bits((2, 5, 4, 3, 8), dtype, seed) for seed in (0, 1))
    new_k, new_v = (_random_bits((3, 3, 8), layout.storage_dtype, seed) for seed in (2, 3))
    pages, slots = jnp.array([4, 2, 5]), jnp.array([3, 0, 1])  # page 5: dropped

    kv_cache = layout.write_tokens(
        from_logical(layout, jnp.asarray(k), jnp.asarray(v)),
        *(1, pages, slots, jnp.asarray(new_k), jnp.asarray(new_v)),
    )
    for array, new in ((k, new_k), (v, new_v)):
        array[1, 4, 3], array[1, 2, 0] = new.view(dtype)[:2]
    for got, want in zip(to_logical(layout, kv_cache), (k, v), strict=True):
        assert np.asarray(got).tobytes() == want.tobytes()

    read = layout.read_tokens(kv_cache, 1, jnp.array([2, 1, 4]), jnp.array([0, 2, 3]))
    for got, want in zip(read, (k, v), strict=True):
        assert np.asarray(got).tobytes() == want[1, [2, 1, 4], [0, 2, 3]].tobytes()


def test_definition_does_not_depend_on_the_axis_order():
    config = dataclasses.replace(CONFIGS["f32-over-bf16"], axes="LKPSH")
    assert config.layout.axes != CONFIGS["f32-over-bf16"].layout.axes
    case = make_case(config, [RowPlan(5, 9), RowPlan(1, 20)], seed=0)
    harness.check(case, case.expected(), harness.run("reference", case))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_encode_keeps_every_float8(dtype):
    layout = KVCacheLayout.for_platform("cpu", 1, 1, 16, dtype, 4)
    every = np.arange(256, dtype=np.uint8).view(layout.dtype)
    finite = every[np.isfinite(every.astype(np.float32))][:240].reshape(-1, 1, 16)
    scale = jnp.array([0.3], jnp.float32)
    decoded = layout.decode(jnp.asarray(finite.view(layout.storage_dtype)), scale)
    np.testing.assert_allclose(decoded, finite.astype(np.float64) * 0.3, rtol=2**-22)
    encoded = layout.encode(decoded, scale)
    assert encoded.dtype == layout.storage_dtype
    assert np.asarray(encoded).tobytes() == finite.tobytes()


@pytest.mark.parametrize("dtype", ["int8", *FLOAT8_DTYPES])
def test_encode_rounds_to_nearest_even_and_saturates(dtype):
    layout = KVCacheLayout.for_platform("cpu", 1, 1, 4, dtype, 4)
    if dtype == "int8":
        largest, smallest, ties = 127.0, -128.0, {0.5: 0.0, 1.5: 2.0, -2.5: -2.0, 126.5: 126.0}
    else:
        largest = float(ml_dtypes.finfo(layout.dtype).max)
        smallest = -largest
        eps = float(ml_dtypes.finfo(layout.dtype).eps)
        ties = {1 + eps / 2: 1.0, 1 + 1.5 * eps: 1 + 2 * eps, -1 - eps / 2: -1.0, 0.0: 0.0}
    wanted = {largest * 1.5: largest, smallest * 1e6: smallest, **ties, np.inf: largest, 1.0: 1.0}
    values = jnp.array(list(wanted), jnp.float32).reshape(-1, 1, 4)
    for scale in (None, jnp.array([0.25], jnp.float32)):
        stored = jax.jit(layout.encode)(values if scale is None else values * 0.25, scale)
        np.testing.assert_array_equal(
            np.asarray(stored).view(layout.dtype).astype(np.float32).ravel(),
            np.array(list(wanted.values()), np.float32),
        )


def test_scales_belong_to_heads():
    layout = KVCacheLayout.for_platform("cpu", 1, 2, 1, "int8", 4)
    scale = jnp.array([0.5, 4.0], jnp.float32)
    stored = layout.encode(jnp.array([[[8.0], [8.0]]]), scale)
    assert np.asarray(stored).ravel().tolist() == [16, 2]
    assert np.asarray(layout.decode(stored, scale)).ravel().tolist() == [8, 8]
