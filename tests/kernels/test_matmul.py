"""Products with stored weights: XLA's, and those in C on a CPU."""

import concurrent.futures
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul as op
from pallas_kernels import native
from pallas_kernels.chips import CHIPS
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.matmul import NOTHING_FUSED, Fused, Int8Weights, MatmulCall, cpu, matmul
from tests.native import HAS_COMPILER, HAS_TILES, IN_C, needs_compiler, needs_tiles

CPU = CHIPS["cpu"]
BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
CALL = MatmulCall(CPU, (8, 576, 3072), BFLOAT16, 1)


def random_arrays(num_tokens: int, width: int, num_channels: int, dtype=BFLOAT16):
    rng = np.random.default_rng(num_tokens * width + num_channels)
    x = jnp.asarray(rng.standard_normal((num_tokens, width)), dtype)
    return x, jnp.asarray(rng.standard_normal((3, num_channels, width)), dtype)


def wanted(x: jax.Array, weights: jax.Array, layer: int) -> np.ndarray:
    x64, weight64 = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weights[layer]))
    return x64 @ weight64.T


@pytest.fixture
def by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has nothing for bfloat16."""
    monkeypatch.setattr(native, "has_tiles", lambda: False)
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)


def check_products(implementation, num_tokens, width, num_channels):
    x, weights = random_arrays(num_tokens, width, num_channels)
    run = jax.jit(functools.partial(matmul, chip=CPU, implementation=implementation))
    for layer in range(3):
        got = run(x, weights, jnp.int32(layer))
        assert got.dtype == jnp.float32
        # Products of two bfloat16 are exact in float32; sums of up to 900, of about 30, are not.
        np.testing.assert_allclose(got, wanted(x, weights, layer), rtol=0, atol=900 * 2**-22)
    rounded = matmul(
        *(x, weights, layer), chip=CPU, implementation=implementation, out_dtype=BFLOAT16
    )
    assert rounded.dtype == BFLOAT16 and np.array_equal(rounded, got.astype(BFLOAT16))


def check_int8(implementation, num_tokens, width, num_channels, dtype=BFLOAT16):
    """Live tokens only: the last one is not."""
    rng = np.random.default_rng(num_tokens * width + num_channels)
    x = jnp.asarray(rng.standard_normal((num_tokens + 1, width)), dtype)
    values = rng.integers(-127, 128, (3, num_channels, width)).astype(np.int8)
    scales = rng.uniform(0.5, 2, (3, num_channels)).astype(np.float32)
    weights = Int8Weights(jnp.asarray(values), jnp.asarray(scales))
    run = jax.jit(functools.partial(matmul, chip=CPU, implementation=implementation))
    for layer in (0, 2):
        got = np.asarray(run(x, weights, jnp.int32(layer), jnp.int32(num_tokens)))[:num_tokens]
        matrix = values[layer] * scales[layer].astype(np.float64)[:, None]
        x64 = np.asarray(x, np.float64)[:num_tokens]
        peaks = np.abs(x64).max(axis=1, keepdims=True)
        # Tokens as integers of 16 bits are off by half a step of the largest / 32,639.
        sums = np.abs(matrix).sum(axis=1) * peaks
        np.testing.assert_array_less(np.abs(got - x64 @ matrix.T), sums / 65_000)


def check_fused(implementation, num_tokens, width, num_channels, dtype=BFLOAT16):
    """A norm before, gates before, and a residual after; the last token is not live."""
    rng = np.random.default_rng(num_tokens * width + num_channels)
    unit = 2.0 ** (-8 if dtype == BFLOAT16 else -20)

    def array(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    x, gated = (
        array(num_tokens + 1, width, scale=3.0),
        array(num_tokens + 1, 1, 2, width, scale=9.0),
    )
    norm, residual = array(3, width), array(num_tokens + 1, num_channels, scale=20.0)
    weights = array(3, num_channels, width).astype(BFLOAT16)
    values = rng.integers(-127, 128, weights.shape).astype(np.int8)
    int8 = Int8Weights(jnp.asarray(values), jnp.full(weights.shape[:2], 0.01, jnp.float32))
    run = jax.jit(
        lambda *args, **fused: matmul(
            *args,
            Fused(eps=0.5, **fused),
            out_dtype=dtype,
            chip=CPU,
            implementation=implementation,
        ),
        static_argnames="is_gated",
    )

    def check(x: jax.Array, prepared: np.ndarray, **fused: Any) -> None:
        added = np.asarray(fused.get("residual", jnp.zeros(())), np.float64)
        for of_kind, matrices in (
            (weights, np.asarray(weights, np.float64)),
            (int8, values * 0.01),
        ):
            got = run(x, of_kind, jnp.int32(1), jnp.int32(num_tokens), **fused)
            want = prepared @ matrices[1].T + added
            # What is prepared is rounded, and so are sums, before and after what is added.
            largest = np.abs(prepared) @ np.abs(matrices[1]).T + np.abs(added) + np.abs(want)
            off = np.abs(np.asarray(got, np.float64) - want) / largest
            assert off[:num_tokens].max() < unit
            assert got.dtype == dtype and np.isfinite(np.asarray(got, np.float32)).all()

    x64, gated64 = np.asarray(x, np.float64), np.asarray(gated, np.float64)[:, 0]
    normed = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 0.5) * np.asarray(norm, np.float64)[1]
    passed = gated64[:, 0] / (1 + np.exp(-gated64[:, 0])) * gated64[:, 1]
    check(x, normed, norm=norm)
    check(x, x64, residual=residual)
    check(x, normed, norm=norm, residual=residual)
    check(gated, passed, is_gated=True)
    check(gated, passed, is_gated=True, residual=residual)


NUM_TOKENS = pytest.mark.parametrize("num_tokens", [*range(1, 10), 16, 33])
SIZES = pytest.mark.parametrize(("width", "num_channels"), [(64, 96), (49, 1), (7, 50), (900, 133)])


@NUM_TOKENS
@SIZES
def test_products_of_xla(num_tokens, width, num_channels):
    check_products("xla", num_tokens, width, num_channels)


@needs_compiler
@NUM_TOKENS
@SIZES
def test_products_by_vectors(by_vectors, num_tokens, width, num_channels):
    check_products("cpu", num_tokens, width, num_channels)


@needs_tiles
@NUM_TOKENS
@SIZES
def test_products_by_tiles(num_tokens, width, num_channels):
    check_products("cpu", num_tokens, width, num_channels)


@NUM_TOKENS
@SIZES
def test_int8_of_xla(num_tokens, width, num_channels):
    check_int8("xla", num_tokens, width, num_channels, FLOAT32)


@needs_compiler
@NUM_TOKENS
@SIZES
def test_int8_by_vectors(by_vectors, num_tokens, width, num_channels):
    check_int8("cpu", num_tokens, width, num_channels)


@needs_tiles
@NUM_TOKENS
@SIZES
def test_int8_by_tiles(num_tokens, width, num_channels):
    check_int8("cpu", num_tokens, width, num_channels)


FUSED = pytest.mark.parametrize("num_tokens", [1, 9, 33])


@FUSED
@SIZES
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_fused_of_xla(num_tokens, width, num_channels, dtype):
    check_fused("xla", num_tokens, width, num_channels, dtype)


@needs_compiler
@FUSED
@SIZES
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_fused_by_vectors(by_vectors, num_tokens, width, num_channels, dtype):
    check_fused("cpu", num_tokens, width, num_channels, dtype)


@needs_tiles
@FUSED
@SIZES
def test_fused_by_tiles(num_tokens, width, num_channels):
    check_fused("cpu", num_tokens, width, num_channels)


@pytest.mark.parametrize("implementation", ["xla", IN_C])
def test_gates_pass_what_is_large_and_what_is_no_number(implementation):
    gates = jnp.array([90.0, -90.0, 3e38, -3e38, jnp.nan, jnp.inf, 0.0, -1e-30], BFLOAT16)
    x = jnp.zeros((8, 1, 2, 16), BFLOAT16).at[:, 0, :, 3].set(1).at[:, 0, 0, 3].set(gates)
    weights = jnp.ones((1, 5, 16), BFLOAT16)
    fused = Fused(is_gated=True)
    got = np.asarray(matmul(x, weights, 0, None, fused, chip=CPU, implementation=implementation))
    want = [90.0, 0.0, 3e38, 0.0, np.nan, np.inf, 0.0, 0.0]
    np.testing.assert_allclose(got, np.tile(np.array(want)[:, None], 5), rtol=0.01, atol=1e-29)


def test_what_is_fused_must_fit():
    x, weights = random_arrays(4, 64, 96)
    for fused in (
        Fused(norm=jnp.ones((3, 63), BFLOAT16)),
        Fused(norm=jnp.ones((2, 64), BFLOAT16)),
        Fused(residual=jnp.ones((4, 95), BFLOAT16)),
        Fused(is_gated=True),
    ):
        with pytest.raises(ValueError, match=r"norm|added|fit"):
            matmul(x, weights, 0, None, fused, chip=CPU)
    for shape in ((4, 1, 1, 128), (4, 1, 4, 32)):
        with pytest.raises(ValueError, match="fit"):
            matmul(jnp.ones(shape, BFLOAT16), weights, 0, None, Fused(is_gated=True), chip=CPU)
    gated = jnp.ones((4, 1, 2, 64), BFLOAT16)
    both = Fused(norm=jnp.ones((3, 64), BFLOAT16), is_gated=True)
    with pytest.raises(ValueError, match="not both"):
        matmul(gated, weights, 0, None, both, chip=CPU)


@needs_tiles
def test_int8_tokens_keep_their_scale_and_their_faults_to_themselves():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 100)).astype(np.float32)
    x[1], x[2], x[3, 7], x[4, 9] = 0, 1e-36, np.nan, -np.inf
    x[5] *= 2.0**100
    values = rng.integers(-127, 128, (1, 40, 100)).astype(np.int8)
    weights = Int8Weights(jnp.asarray(values), jnp.ones((1, 40), jnp.float32))
    x = jnp.asarray(x, BFLOAT16)
    got = np.asarray(matmul(x, weights, chip=CPU, implementation="cpu"))
    assert not got[1:3].any() and np.isnan(got[3:5]).all()
    want = np.asarray(x, np.float64)[[0, 5]] @ values[0].T.astype(np.float64)
    np.testing.assert_allclose(got[[0, 5]], want, rtol=0, atol=np.abs(want).max() * 2**-12)


@needs_tiles
def test_tiles_multiply_a_token_the_same_among_any_others():
    x, weights = random_arrays(75, 160, 70)
    run = jax.jit(
        lambda x, weights, layer=0, num_tokens=None, fused=NOTHING_FUSED: matmul(
            *(x, weights, layer, num_tokens, fused), chip=CPU, implementation="cpu"
        ),
        static_argnums=4,
    )
    together = np.asarray(run(x, weights))
    values = np.random.default_rng(0).integers(-127, 128, weights.shape).astype(np.int8)
    int8 = Int8Weights(jnp.asarray(values), jnp.ones(weights.shape[:2], jnp.float32))
    int8_together = np.asarray(run(x, int8))
    gated, fused = jnp.stack([x, x[::-1]], axis=1)[:, None], Fused(is_gated=True)
    gated_together = np.asarray(run(gated, weights, 0, None, fused))
    for begin, end in [(0, 1), (5, 6), (3, 30), (40, 75)]:
        passed = run(gated[begin:end], weights, 0, None, fused)
        assert np.array_equal(passed, gated_together[begin:end])
        assert np.array_equal(run(x[begin:end], weights), together[begin:end])
        assert np.array_equal(run(x[begin:end], int8), int8_together[begin:end])


@needs_compiler
def test_activations_of_float32_are_not_rounded():
    x, weights = random_arrays(5, 64, 96)
    x = x.astype(jnp.float32) * 1.001
    got = matmul(x, weights, 1, chip=CPU, implementation="cpu")
    np.testing.assert_allclose(got, wanted(x, weights, 1), rtol=0, atol=64 * 2**-20)


@needs_compiler
def test_dead_tokens_cost_nothing_and_are_zeros():
    x, weights = random_arrays(8, 64, 100)
    x = x.at[5:].set(jnp.nan)
    run = jax.jit(functools.partial(matmul, chip=CPU, implementation="cpu"))
    for num_live in (0, 1, 4, 5):
        got = run(x, weights, 1, jnp.int32(num_live))
        np.testing.assert_allclose(got[:num_live], wanted(x, weights, 1)[:num_live], atol=1e-4)
        assert not np.asarray(got[num_live:]).any()


@needs_compiler
def test_a_token_that_is_nan_has_no_effect_on_others():
    x, weights = random_arrays(8, 64, 100)
    got = np.asarray(matmul(x.at[2, 3].set(jnp.nan), weights, chip=CPU, implementation="cpu"))
    assert np.isnan(got[2]).all()
    assert np.isfinite(np.delete(got, 2, axis=0)).all()


@needs_compiler
def test_in_a_loop_over_layers_no_weight_is_copied():
    x, weights = random_arrays(4, 64, 64)

    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, i: jax.Array):
            return matmul(x, weights, i, chip=CPU, implementation="cpu").astype(x.dtype), None

        return jax.lax.scan(layer, x, jnp.arange(3, dtype=jnp.int32))[0]

    compiled = jax.jit(run).lower(x, weights).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < weights[0].nbytes // 2
    expected = x
    for i in range(3):
        expected = jnp.asarray(wanted(expected, weights, i), x.dtype)
    got = np.asarray(compiled(x, weights), np.float32)
    np.testing.assert_allclose(got, np.asarray(expected, np.float32), rtol=0.02, atol=2)


@needs_compiler
def test_many_at_once():
    """More products than threads: none waits for another's helpers."""
    x, weights = random_arrays(8, 576, 1536)
    run = jax.jit(functools.partial(matmul, chip=CPU, implementation="cpu"))
    first = np.asarray(run(x, weights, 1))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: np.asarray(run(x, weights, 1)), range(200)):
            assert np.array_equal(got, first)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chip": CHIPS["v6e"]}, "runs on CPUs"),
        ({"num_devices": 2}, "does not cut"),
        ({"num_gated": 2}, "gates of one part"),
        ({"weight_dtype": FLOAT32}, "not float32"),
        ({"weight_dtype": jnp.dtype("int8"), "shape": (8, 140_000, 8)}, "131,072 products"),
        ({"shape": (17, 576, 3072)}, "up to 16 tokens"),
    ],
)
def test_what_is_refused_goes_to_xla(by_vectors, monkeypatch, change, reason):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: True)
    call = MatmulCall(**{f: getattr(CALL, f) for f in CALL.__dataclass_fields__} | change)
    explanation = op.explain(call)
    assert explanation.chosen == "xla" and reason in explanation.refused["cpu"]
    assert op.explain(CALL).chosen == IN_C
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    assert "tokens" not in op.explain(call).refused.get("cpu", "")


@needs_compiler
def test_a_program_for_another_version_of_the_library_is_an_error():
    """As when a program was stored before its arguments became others."""
    x, weights = jnp.zeros((8, 8), BFLOAT16), jnp.zeros((1, 8, 8), BFLOAT16)
    out = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="another version"):
        jax.ffi.ffi_call(cpu._TARGET, out)(x, weights, jnp.array([0, 8], jnp.int32))


@pytest.mark.skipif(not HAS_COMPILER or HAS_TILES, reason="the library has tiles, or is none")
def test_tiles_that_the_library_lacks_are_an_error(monkeypatch: pytest.MonkeyPatch):
    """As when a stored program was made with a compiler that knows tiles, and this one does not."""
    x, weights = random_arrays(2, 64, 64)
    monkeypatch.setattr(native, "has_tiles", lambda: True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a library that does not"):
        matmul(x, weights, chip=CPU, implementation="cpu")


def test_float32_is_not_served():
    x, weights = random_arrays(2, 8, 8, FLOAT32)
    with pytest.raises(UnsupportedError, match="not float32"):
        matmul(x, weights, chip=CPU, implementation="cpu")
    with pytest.raises((ValueError, TypeError)):  # the second where annotations are checked
        matmul(x[:, :3], weights, chip=CPU)
    scales = jnp.ones((3, 7), jnp.float32)
    with pytest.raises((ValueError, TypeError), match=r"scales|Type"):
        matmul(x, Int8Weights(weights.astype(jnp.int8), scales), chip=CPU)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nothing was compiled yet; what is, goes elsewhere."""
    functions = (native.problem, native.library, native.has_tiles)
    for function in functions:
        function.cache_clear()
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    for function in functions:
        function.cache_clear()


def test_without_a_compiler_xla_serves(fresh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    explanation = op.explain(CALL)
    assert explanation.chosen == "xla" and "no C compiler" in explanation.refused["cpu"]


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    failing = [sys.executable, "-c", "import sys; sys.exit('no such flag')"]
    monkeypatch.setattr(native, "_compiler", lambda: failing)
    assert "no such flag" in op.explain(CALL).refused["cpu"]
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_without_a_home_it_is_made_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", nobody)
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    made = native.make_library()
    assert made.is_file() and made.is_relative_to(tmp_path)


@needs_compiler
def test_the_library_is_made_once(fresh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = native.make_library()
    assert made.is_relative_to(tmp_path)

    def fail(*args: object, **kwargs: object) -> None:
        raise subprocess.SubprocessError("compiled again")

    monkeypatch.setattr(native.subprocess, "run", fail)
    assert native.make_library() == made
