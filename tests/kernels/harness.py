"""Runs a case through an implementation and compares everything the contract promises."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention import KVCache, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.layout import from_logical, to_logical
from tests.kernels import gpu_simulator, tpu_simulator
from tests.kernels.cases import Case, Config
from tests.kernels.oracle import Expected

# The context in which a CPU runs an implementation that is not in plain JAX.
SIMULATORS = {"gpu": gpu_simulator.simulate, "tpu": tpu_simulator.simulate}
# Simulated operations take milliseconds, whatever compiles them.
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# How often each (implementation, config) was traced.
num_traces: collections.Counter[tuple[str, Config]] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Result:
    """What an implementation returned, the cache with logical axes."""

    out: Float[np.ndarray, "T N H"]
    k: Shaped[np.ndarray, "L P S K H"]
    v: Shaped[np.ndarray, "L P S K H"]


@functools.cache
def _compiled(
    implementation: str, config: Config, scale: float
) -> Callable[..., tuple[jax.Array, KVCache]]:
    is_simulated = implementation in SIMULATORS
    chip = CHIPS[config.chip]
    if is_simulated:  # the simulator runs one thread block after the other
        chip = dataclasses.replace(chip, num_cores=min(chip.num_cores, 2))

    @functools.partial(
        jax.jit,
        donate_argnames="kv_cache",
        compiler_options=_FAST_COMPILE if is_simulated else None,
    )
    def call(kv_cache: KVCache, **arrays: jax.Array | None) -> tuple[jax.Array, KVCache]:
        num_traces[implementation, config] += 1
        return ragged_paged_attention(
            kv_cache=kv_cache,
            layout=config.layout,
            chip=chip,
            scale=scale,
            sliding_window=config.sliding_window,
            soft_cap=config.soft_cap,
            implementation=implementation,
            **arrays,  # pyright: ignore[reportArgumentType]
        )

    return call


def run(implementation: str, case: Case) -> Result:
    """One call, compiled once a config, the cache donated."""
    layout = case.config.layout
    kv_cache = from_logical(layout, jnp.asarray(case.k_before), jnp.asarray(case.v_before))
    donated = kv_cache.k
    arrays = dict(
        q=case.q,
        k=case.k,
        v=case.v,
        layer=np.int32(case.layer),
        block_tables=case.block_tables,
        kv_lens=case.kv_lens,
        cu_q_lens=case.cu_q_lens,
        num_rows=np.int32(len(case.rows)),
        sinks=case.options.sinks,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    call = _compiled(implementation, case.config, case.options.scale)
    with SIMULATORS.get(implementation, contextlib.nullcontext)():
        out, kv_cache = jax.block_until_ready(call(kv_cache, **jax.tree.map(jnp.asarray, arrays)))
    assert donated.is_deleted(), "the donated cache was copied, not updated in place"
    k, v = to_logical(layout, kv_cache)
    return Result(np.asarray(out), np.asarray(k), np.asarray(v))


def check(case: Case, expected: Expected, result: Result) -> None:
    """Fails unless `result` is right: output, cache at live places, nothing else touched."""
    assert result.out.dtype == case.q.dtype
    num_tokens = sum(row.q_len for row in case.rows)
    np.testing.assert_array_equal(
        result.out[num_tokens:].astype(np.float32), 0, "output of padding tokens"
    )
    out = result.out.astype(np.float64)
    error = np.abs(out - expected.out)
    is_right = error <= expected.tolerance  # False for NaN
    if not is_right.all():
        worst = np.unravel_index(np.argmax(np.where(is_right, -1, np.nan_to_num(error))), out.shape)
        raise AssertionError(
            f"{(~is_right).sum()} of {out.size} outputs are off; the worst is (token, head, dim) "
            f"{tuple(map(int, worst))}: {out[worst]}, expected {expected.out[worst]} "
            f"± {expected.tolerance[worst]}"
        )
    for name, got, want in (("K", result.k, case.k_after), ("V", result.v, case.v_after)):
        differs = (_bits(got) != _bits(want)).any(axis=(3, 4))
        differs[:, 0] = False  # the null page: padding may be written there
        if differs.any():
            layer, page, slot = map(int, np.argwhere(differs)[0])
            raise AssertionError(f"{name} cache differs at layer {layer}, page {page}, slot {slot}")


def _bits(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
