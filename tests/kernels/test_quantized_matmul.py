"""Every implementation of the quantized matmul against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS
from pallas_kernels.quantized_matmul import IMPLEMENTATIONS, QuantizedWeight, quantized_matmul

U32 = 2.0**-24
DTYPES = [
    ("float32", "int8"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float8_e5m2"),
]
WIDTH, CHANNELS = 96, 40


def _weight(rng: np.random.Generator, dtype: str, num_blocks: int) -> QuantizedWeight:
    if dtype.startswith("int"):
        low, high = (-128, 128) if dtype == "int8" else (-8, 8)
        values = rng.integers(low, high, (WIDTH, CHANNELS)).astype(dtype)
    else:
        values = rng.normal(size=(WIDTH, CHANNELS)).astype(dtype)
    return QuantizedWeight(values, rng.uniform(0.01, 2, (num_blocks, CHANNELS)).astype(np.float32))


def _quantized(x: np.ndarray, num_blocks: int, dtype: str) -> np.ndarray:
    """What w8a8 makes of x, in float64."""
    blocks = x.astype(np.float32).reshape(len(x), num_blocks, -1)
    peaks = np.abs(blocks).max(axis=2, keepdims=True)
    largest = np.float32(127 if dtype.startswith("int") else 448)
    inverses = np.divide(largest, peaks, out=np.zeros_like(peaks), where=peaks > 0)
    scaled = np.clip(blocks * inverses, -largest, largest)
    is_integer = dtype.startswith("int")
    scaled = np.rint(scaled) if is_integer else scaled.astype(ml_dtypes.float8_e4m3fn)
    scales = peaks * (np.float32(1) / largest)
    return (scaled.astype(np.float64) * scales.astype(np.float64)).reshape(x.shape)


def _expected(
    x: np.ndarray, weight: QuantizedWeight, quantize_x: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result and its tolerance.

    Sums of D float32 products and of the scaled blocks round by at most U32 a term; a matrix that
    is rounded to x's dtype moves each product by that dtype's unit roundoff, and so does the
    rounding of the result.
    """
    num_blocks = len(weight.scales)
    unit = float(jnp.finfo(x.dtype).eps) / 2
    scales = np.repeat(weight.scales.astype(np.float64), WIDTH // num_blocks, axis=0)
    matrix = weight.values.astype(np.float64) * scales
    tokens = x.astype(np.float64)
    if quantize_x:
        tokens = _quantized(x, num_blocks, str(weight.values.dtype))
    out = tokens @ matrix
    relative = (WIDTH + 2 * num_blocks + 8) * U32
    if num_blocks > 1 and not quantize_x:
        relative += unit
    return out, relative * (np.abs(tokens) @ np.abs(matrix)) + unit * np.abs(out)


@functools.cache
def _compiled(implementation: str, chip: str, quantize_x: bool):
    return jax.jit(
        functools.partial(
            quantized_matmul,
            chip=CHIPS[chip],
            quantize_x=quantize_x,
            implementation=implementation,
        )
    )


# The chip decides how blocks are dequantized.
@pytest.mark.parametrize(
    ("implementation", "chip"), [("reference", "cpu"), ("xla", "cpu"), ("xla", "v6e")]
)
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES, ids=map("-".join, DTYPES))
@pytest.mark.parametrize("quantize_x", [False, True], ids=["a16", "a8"])
def test_matches_numpy(implementation, chip, x_dtype, dtype, quantize_x):
    rng = np.random.default_rng(3)
    for num_blocks in (1, 3):
        weight = _weight(rng, dtype, num_blocks)
        for num_tokens in (7, 40):  # either side of what is worth dequantizing for
            x = rng.normal(size=(num_tokens, WIDTH)).astype(jnp.dtype(x_dtype))
            x[0] = 0
            out = _compiled(implementation, chip, quantize_x)(x, weight)
            assert out.dtype == x.dtype
            expected, tolerance = _expected(x, weight, quantize_x)
            error = np.abs(np.asarray(out).astype(np.float64) - expected)
            assert (error <= tolerance).all(), (num_blocks, num_tokens, (error - tolerance).max())


@pytest.mark.parametrize("quantize_x", [False, True], ids=["a16", "a8"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_of_nan_is_alone(implementation, quantize_x):
    rng = np.random.default_rng(4)
    weight = _weight(rng, "int8", 3)
    x = rng.normal(size=(7, WIDTH)).astype(np.float32)
    call = _compiled(implementation, "cpu", quantize_x)
    right = np.asarray(call(x, weight))
    x[2] = np.nan
    poisoned = np.asarray(call(x, weight))
    np.testing.assert_array_equal(np.delete(poisoned, 2, 0), np.delete(right, 2, 0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("quantize_x", [False, True], ids=["a16", "a8"])
def test_every_scale_and_value_counts(implementation, quantize_x):
    rng = np.random.default_rng(5)
    weight = _weight(rng, "int8", 3)
    x = rng.normal(size=(7, WIDTH)).astype(np.float32)
    call = _compiled(implementation, "cpu", quantize_x)
    right = np.asarray(call(x, weight))
    scales, values = weight.scales.copy(), weight.values.copy()
    scales[1, 5] *= 1.01
    values[50, 7] ^= 1
    for changed, channel in (
        (weight._replace(scales=scales), 5),
        (weight._replace(values=values), 7),
    ):
        differs = (np.asarray(call(x, changed)) != right).any(axis=0)
        assert np.flatnonzero(differs).tolist() == [channel]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((2, 5), np.float32)}, "do not fit"),
        (
            {"weight": QuantizedWeight(np.zeros((4, 3), np.int8), np.ones((3, 3), np.float32))},
            "fit",
        ),
        (
            {"weight": QuantizedWeight(np.zeros((4, 3), np.int16), np.ones((1, 3), np.float32))},
            "int16",
        ),
        ({"implementation": "abacus"}, "no such implementation"),
    ],
)
def test_refuses_what_does_not_fit(changes, message):
    weight = QuantizedWeight(np.zeros((4, 3), np.int8), np.ones((2, 3), np.float32))
    arguments = {"x": np.zeros((2, 4), np.float32), "weight": weight, "implementation": "auto"}
    arguments |= changes
    with pytest.raises(ValueError, match=message):
        quantized_matmul(
            jnp.asarray(arguments["x"]),
            jax.tree.map(jnp.asarray, arguments["weight"]),
            chip=CHIPS["cpu"],
            implementation=arguments["implementation"],
        )
