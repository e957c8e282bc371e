"""The op: causal attention of ragged rows over a paged KV cache, with the KV write included."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.chips import Chip
from pallas_kernels.ragged_paged_attention import cpu, gpu, reference, tpu, xla
from pallas_kernels.ragged_paged_attention.layout import (
    QUANTIZED_DTYPES,
    KVCache,
    KVCacheLayout,
)
from pallas_kernels.ragged_paged_attention.rope import RopeTables, unpack_and_rotate
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

__all__ = [
    "AUTO_ORDER",
    "IMPLEMENTATIONS",
    "AttentionCall",
    "AttentionPlan",
    "KVCache",
    "KVCacheLayout",
    "RopeTables",
    "attend_packed",
    "explain",
    "plan_attention",
    "ragged_paged_attention",
    "unsupported_reason",
]


@runtime_checkable
class AttentionImplementation(dispatch.Implementation[AttentionCall], Protocol):
    """What a module of this package must hold to be an implementation.

    The function is called with arguments that `ragged_paged_attention` has checked: scales are
    float32 of one entry a KV head. `call` has the layout, the chip, the window and the soft cap.
    """

    def ragged_paged_attention(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_cache: KVCache,
        layer: int | Int32[Array, ""],
        block_tables: Int32[Array, "R B"],
        kv_lens: Int32[Array, " R"],
        cu_q_lens: Int32[Array, " R+1"],
        num_rows: int | Int32[Array, ""],
        *,
        call: AttentionCall,
        scale: float,
        sinks: Float32[Array, " N"] | None,
        k_scale: Float32[Array, " K"] | None,
        v_scale: Float32[Array, " K"] | None,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `pallas_kernels.ragged_paged_attention.ragged_paged_attention`."""
        ...


@runtime_checkable
class PlanningImplementation(dispatch.Implementation[AttentionCall], Protocol):
    """An implementation that prepares work which is the same in every layer, once."""

    def plan(
        self,
        call: AttentionCall,
        num_tokens: int,
        num_pages: int,
        block_tables: Int32[Array, "R B"],
        kv_lens: Int32[Array, " R"],
        cu_q_lens: Int32[Array, " R+1"],
        num_rows: int | Int32[Array, ""],
    ) -> Any:
        """A pytree; see `plan_attention`."""
        ...

    def ragged_paged_attention(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_cache: KVCache,
        layer: int | Int32[Array, ""],
        plan: Any,
        *,
        call: AttentionCall,
        scale: float,
        sinks: Float32[Array, " N"] | None,
        k_scale: Float32[Array, " K"] | None,
        v_scale: Float32[Array, " K"] | None,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `AttentionImplementation`; the plan stands for the arrays that it was made of."""
        ...


@runtime_checkable
class PackedImplementation(dispatch.Implementation[AttentionCall], Protocol):
    """A planning implementation that unpacks and rotates, too, rather than leave that to XLA."""

    def attend_packed(
        self,
        qkv: Float[Array, "T K C H"],
        tables: RopeTables,
        kv_cache: KVCache,
        layer: int | Int32[Array, ""],
        plan: Any,
        *,
        call: AttentionCall,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `pallas_kernels.ragged_paged_attention.attend_packed`."""
        ...


IMPLEMENTATIONS: Mapping[str, AttentionImplementation | PlanningImplementation] = {
    "tpu": tpu,
    "gpu": gpu,
    "cpu": cpu,
    "xla": xla,
    "reference": reference,
}

# What "auto" tries on each platform, best first.
AUTO_ORDER = {
    "cpu": ("cpu", "xla", "reference"),
    "gpu": ("gpu", "xla", "reference"),
    "tpu": ("tpu", "xla", "reference"),
}


def unsupported_reason(implementation: str, call: AttentionCall) -> str | None:
    """Why `implementation` cannot serve `call`, or None when it can."""
    return dispatch.unsupported_reason(IMPLEMENTATIONS, implementation, call)


def explain(call: AttentionCall) -> dispatch.Explanation:
    """What "auto" chooses for `call`, and why the others were refused."""
    return dispatch.explain(IMPLEMENTATIONS, AUTO_ORDER[call.layout.platform], call)


# The implementation, the call, its tokens and the pages of its cache.
type _MadeFor = tuple[str, AttentionCall, int, int]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["where"], meta_fields=["made_for"]
)
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """What of a call depends on its rows alone. A pytree, as `plan_attention` makes it.

    where: what an implementation takes after the layer: its own plan, or the arrays themselves.
    """

    where: tuple[Any, ...]
    made_for: _MadeFor


def plan_attention(
    call: AttentionCall,
    num_tokens: int,
    num_pages: int,
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
    *,
    implementation: str = "auto",
) -> AttentionPlan:
    """The plan of all calls of a step that differ in nothing but layer, q, k, v and weights.

    Make it once, outside of the loop over layers: XLA does not move it there. Layers whose calls
    differ, as in the window, have a plan each. Arrays are those of `ragged_paged_attention`.

    Raises:
        UnsupportedError: `implementation` cannot serve the call, or with "auto" nothing can.
    """
    made_for = (_choose(implementation, call), call, num_tokens, num_pages)
    return _plan(made_for, (block_tables, kv_lens, cu_q_lens, num_rows))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
    *,
    layout: KVCacheLayout,
    chip: Chip,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " N"] | None = None,
    k_scale: float | Float32[Array, ""] | Float32[Array, " K"] | None = None,
    v_scale: float | Float32[Array, ""] | Float32[Array, " K"] | None = None,
    implementation: str = "auto",
    plan: AttentionPlan | None = None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """Writes this step's K and V into one layer of the cache, then attends to the cache.

    Row r owns tokens cu_q_lens[r] to cu_q_lens[r + 1] (none is fine); they are the last ones of
    its kv_lens[r] tokens, so kv_lens counts this step's tokens. Token p of a row lies in slot
    p % S of page block_tables[r, p // S], and attends to tokens 0..p of its row, or with a
    `sliding_window` to those > p - sliding_window. Rows may share pages that none of them writes.

    Keys and values are taken from the cache as stored, so the result does not depend on how a
    prompt was cut into steps. A score is `scale` * q.k, then soft_cap * tanh(score / soft_cap);
    query head n uses KV head n // (N / K). `sinks` holds a logit a query head that joins the
    softmax's denominator and nothing else; neither `scale` nor `soft_cap` applies to it.
    Scores and softmax are float32; the output has q's dtype.

    An int8 or float8 cache stores value / scale, rounded and saturated (`KVCacheLayout.encode`);
    `k_scale` and `v_scale` are one number or one a KV head, 1 when not given.

    Padding: rows >= num_rows, tokens >= cu_q_lens[num_rows], entries of block_tables past a row's
    last live page (any int32), cache slots that no live token owns and page 0 (any bits, NaN too)
    may hold anything. The output of padding tokens is zero. Nothing is written but the slots of
    this step's tokens and, maybe, page 0.

    The caller sees to it that of rows < num_rows 0 <= cu_q_lens[r + 1] - cu_q_lens[r] <= kv_lens[r]
    <= B * S, what a table has places for, that cu_q_lens[num_rows] <= T, and that tables name pages
    of the cache. No device checks it: where it is not so, results are unspecified.

    `plan` is what `plan_attention` made of the same arrays. Without one it is made here, again in
    each layer.

    `chip` is what the program will run on: kernels take their block sizes from it.

    The cache is returned; donate it, so that it is updated in place.

    Raises:
        ValueError: arguments that do not fit each other, `layout` or `plan`.
        UnsupportedError: `implementation` cannot serve the call, or with "auto" nothing can.
    """
    call = AttentionCall(
        *(layout, chip, q.shape[1], q.dtype, sliding_window, soft_cap),
        has_sinks=sinks is not None,
        has_scales=k_scale is not None or v_scale is not None,
    )
    chosen = _choose(implementation, call)
    where = (block_tables, kv_lens, cu_q_lens, num_rows)
    plan = _checked_plan(chosen, call, q, kv_cache, where, plan)
    return IMPLEMENTATIONS[chosen].ragged_paged_attention(
        *(q, k, v, kv_cache, layer, *plan.where),
        call=call,
        scale=scale,
        sinks=sinks,
        k_scale=_scale_per_head(k_scale, layout),
        v_scale=_scale_per_head(v_scale, layout),
    )


def attend_packed(
    qkv: Float[Array, "T K C H"],
    tables: RopeTables,
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
    *,
    layout: KVCacheLayout,
    chip: Chip,
    scale: float,
    implementation: str = "auto",
    plan: AttentionPlan | None = None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """As `ragged_paged_attention`, of what a projection gives: for each KV head its G queries, its
    key and its value, C = G + 2. Queries and keys are rotated by `tables` first.

    Raises: as `ragged_paged_attention`.
    """
    num_tokens, num_kv_heads, per_kv_head, head_dim = qkv.shape
    if num_kv_heads != layout.num_kv_heads or per_kv_head < 3:
        raise ValueError(f"qkv {qkv.shape} is not for {layout.num_kv_heads} KV heads")
    for name, table in tables._asdict().items():
        if table.shape != (num_tokens, head_dim // 2) or table.dtype != jnp.float32:
            raise ValueError(f"{name} is {table.dtype}{table.shape}, qkv {qkv.shape}")
    num_heads = num_kv_heads * (per_kv_head - 2)
    call = AttentionCall(layout, chip, num_heads, qkv.dtype)
    where = (block_tables, kv_lens, cu_q_lens, num_rows)
    chosen = _choose(implementation, call)
    packed = IMPLEMENTATIONS[chosen]
    if not isinstance(packed, PackedImplementation):
        return ragged_paged_attention(
            *(*unpack_and_rotate(qkv, tables), kv_cache, layer, *where),
            layout=layout,
            chip=chip,
            scale=scale,
            implementation=implementation,
            plan=plan,
        )
    plan = _checked_plan(chosen, call, qkv, kv_cache, where, plan)
    return packed.attend_packed(qkv, tables, kv_cache, layer, *plan.where, call=call, scale=scale)


def _choose(implementation: str, call: AttentionCall) -> str:
    return dispatch.choose(IMPLEMENTATIONS, AUTO_ORDER[call.layout.platform], implementation, call)


def _plan(made_for: _MadeFor, where: tuple[Any, ...]) -> AttentionPlan:
    implementation = IMPLEMENTATIONS[made_for[0]]
    if isinstance(implementation, PlanningImplementation):
        where = (implementation.plan(*made_for[1:], *where),)
    return AttentionPlan(where, made_for)


def _checked_plan(
    chosen: str,
    call: AttentionCall,
    q: Float[Array, "T *N H"],
    kv_cache: KVCache,
    where: tuple[Any, ...],
    plan: AttentionPlan | None,
) -> AttentionPlan:
    """The plan of a call, which is checked; `plan` is the caller's."""
    _check(call, q, kv_cache)
    made_for = (chosen, call, len(q), call.layout.num_pages(kv_cache))
    if plan is None:
        return _plan(made_for, where)
    if plan.made_for != made_for:
        raise ValueError(f"the plan is for {plan.made_for}, not for {made_for}")
    return plan


def _check(call: AttentionCall, q: Float[Array, "T *N H"], kv_cache: KVCache) -> None:
    layout, head_dim = call.layout, q.shape[-1]
    if head_dim != layout.head_dim or call.num_heads % layout.num_kv_heads:
        raise ValueError(
            f"{call.num_heads} query heads of {head_dim} do not fit a cache of "
            f"{layout.num_kv_heads} KV heads of {layout.head_dim}"
        )
    if call.chip.platform != layout.platform:
        raise ValueError(f"the layout is for a {layout.platform}, but {call.chip.name} is none")
    expected = layout.shape(layout.num_pages(kv_cache))
    for name, array, leaf in zip(("K", "V"), kv_cache, expected, strict=True):
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(
                f"{name} cache is {array.dtype}{array.shape}, "
                f"the layout says {leaf.dtype}{leaf.shape}"
            )
    if call.sliding_window is not None and call.sliding_window < 1:
        raise ValueError(f"sliding_window is {call.sliding_window}, must be at least 1")
    if call.soft_cap is not None and call.soft_cap <= 0:
        raise ValueError(f"soft_cap is {call.soft_cap}, must be above 0")
    if call.has_scales and layout.dtype not in QUANTIZED_DTYPES:
        raise ValueError(f"k_scale and v_scale are for quantized caches, not {layout.dtype}")


def _scale_per_head(
    scale: float | Float32[Array, ""] | Float32[Array, " K"] | None, layout: KVCacheLayout
) -> Float32[Array, " K"] | None:
    if scale is None:
        return None
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (layout.num_kv_heads,))
