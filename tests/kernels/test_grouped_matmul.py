"""Every implementation of the grouped matmul against NumPy, with any sizes of groups."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul

U32 = 2.0**-24
GROUPS, WIDTH, CHANNELS, TOKENS = 5, 48, 24, 30
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
]


@functools.cache
def _compiled(implementation: str):
    return jax.jit(
        functools.partial(grouped_matmul, chip=CHIPS["cpu"], implementation=implementation)
    )


def _arguments(sizes: list[int], x_dtype: str, dtype: str, seed: int) -> tuple[np.ndarray, ...]:
    """Padding tokens are NaN and infinity, as are the weights of empty groups where they can be."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(jnp.dtype(x_dtype))
    x[sum(sizes) :] = np.nan
    x[sum(sizes) :, ::3] = np.inf
    if dtype == "int8":
        weights = rng.integers(-128, 128, (GROUPS, WIDTH, CHANNELS)).astype(np.int8)
    else:
        weights = rng.normal(size=(GROUPS, WIDTH, CHANNELS)).astype(jnp.dtype(dtype))
    scales = rng.uniform(0.01, 2, (GROUPS, CHANNELS)).astype(np.float32)
    return x, weights, np.array(sizes, np.int32), scales


def _check(implementation: str, sizes: list[int], dtypes: tuple[str, str], seed: int) -> None:
    x, weights, group_sizes, scales = _arguments(sizes, *dtypes, seed)
    has_scales = dtypes[1] not in ("float32", "bfloat16")
    out = _compiled(implementation)(x, weights, group_sizes, scales if has_scales else None)
    assert out.dtype == x.dtype and out.shape == (TOKENS, CHANNELS)
    got = np.asarray(out).astype(np.float64)
    unit = float(jnp.finfo(x.dtype).eps) / 2
    begin = 0
    for group, size in enumerate(sizes):
        tokens = x[begin : begin + size].astype(np.float64)
        matrix = weights[group].astype(np.float64)
        if has_scales:
            matrix = matrix * scales[group].astype(np.float64)
        expected = tokens @ matrix
        # Sums of D float32 products, a scale, and the rounding of the result.
        tolerance = (WIDTH + 4) * U32 * (np.abs(tokens) @ np.abs(matrix)) + unit * np.abs(expected)
        error = np.abs(got[begin : begin + size] - expected)
        assert (error <= tolerance).all(), (group, (error - tolerance).max())
        begin += size
    np.testing.assert_array_equal(got[begin:], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_matches_numpy_on_any_groups(implementation, dtypes):
    for sizes in ([0] * 5, [30, 0, 0, 0, 0], [0, 0, 0, 0, 30], [6] * 5, [1, 0, 20, 0, 2]):
        _check(implementation, sizes, dtypes, seed=sum(sizes))

    @hypothesis.settings(max_examples=10, deadline=None)
    @hypothesis.given(
        cuts=st.lists(st.integers(0, TOKENS), min_size=GROUPS, max_size=GROUPS).map(sorted),
        seed=st.integers(0, 2**32 - 1),
    )
    def check_any(cuts, seed):
        _check(implementation, np.diff([0, *cuts]).tolist(), dtypes, seed)

    check_any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_group_of_nan_is_alone(implementation):
    x, weights, group_sizes, _ = _arguments([6, 4, 0, 7, 8], "float32", "float32", 1)
    right = np.asarray(_compiled(implementation)(x, weights, group_sizes, None))
    x[6:10] = np.nan
    got = np.asarray(_compiled(implementation)(x, weights, group_sizes, None))
    np.testing.assert_array_equal(
        np.delete(got, slice(6, 10), 0), np.delete(right, slice(6, 10), 0)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": jnp.zeros((2, 6))}, "scales are for 8-bit weights"),
        ({"weights": jnp.zeros((2, 4, 6), jnp.int16)}, "int16"),
        ({"implementation": "abacus"}, "no such implementation"),
    ],
)
def test_refuses_what_does_not_fit(changes, message):
    arguments = {
        "x": jnp.zeros((3, 4)),
        "weights": jnp.zeros((2, 4, 6)),
        "group_sizes": jnp.array([1, 2], jnp.int32),
        "scales": None,
    }
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**arguments | changes, chip=CHIPS["cpu"])  # pyright: ignore
