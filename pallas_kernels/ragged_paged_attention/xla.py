"""The op in plain JAX, made fast: loops over the pages that live rows hold and no others.

Rows of one new token go through a pass that is batched over rows and loops over chunks of context;
longer ones are cut into tiles of queries, and each tile loops over its own row's context. Both keep
a running softmax (Milakov and Gimelshein, 2018), so nothing the size of a context is ever stored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from pallas_kernels.ragged_paged_attention.layout import QUANTIZED_DTYPES, KVCache, split_heads
from pallas_kernels.ragged_paged_attention.rows import Rows, find_rows, write_new_tokens
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

_DECODE_CHUNK = 128  # tokens of context a row in one turn of the decode loop
_TILE_CHUNK = 256  # tokens of context in one turn of a tile's loop
_TILE = 64  # queries in a tile
_MASKED = -1e30  # finite, so that a wholly masked chunk gives weights that the next one cancels


def unsupported_reason(call: AttentionCall) -> str | None:
    """Serves every layout that keeps all heads of a token together."""
    axes = call.layout.axes
    return None if axes in ("LPSKH", "LPSX") else f"reads caches of axes LPSKH or LPSX, not {axes}"


class _Context(NamedTuple):
    """What both passes need of the call."""

    kv_cache: KVCache
    layer: int | Int32[Array, ""]
    call: AttentionCall
    scale: float
    sinks: Float32[Array, " N"] | None
    k_scale: Float32[Array, " K"] | None
    v_scale: Float32[Array, " K"] | None


class _Softmax(NamedTuple):
    """A running softmax: the largest score, the sum of weights and the weighted values so far."""

    peak: Float32[Array, "B M"]
    total: Float32[Array, "B M"]
    acc: Float32[Array, "B M X"]

    def output(self) -> Float32[Array, "B M X"]:
        return self.acc / self.total[..., None]


def plan(
    call: AttentionCall,
    num_tokens: int,
    num_pages: int,
    block_tables: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R+1"],
    num_rows: int | Int32[Array, ""],
) -> Rows:
    """See `PlanningImplementation.plan`."""
    where = (block_tables, kv_lens, cu_q_lens, num_rows)
    return find_rows(call.layout, num_tokens, num_pages, *where)


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: KVCache,
    layer: int | Int32[Array, ""],
    plan: Rows,
    *,
    call: AttentionCall,
    scale: float,
    sinks: Float32[Array, " N"] | None,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> tuple[Float[Array, "T N H"], KVCache]:
    """See `PlanningImplementation.ragged_paged_attention`."""
    rows = plan
    kv_cache = write_new_tokens(
        *(call.layout, rows, k, v, kv_cache, layer), k_scale=k_scale, v_scale=v_scale
    )
    context = _Context(kv_cache, layer, call, scale, sinks, k_scale, v_scale)
    is_decode = rows.q_lens == 1
    decoded = _decode_rows(
        context, q, rows.pages, jnp.where(is_decode, rows.kv_lens, 0), rows.starts
    )
    is_decoded = rows.is_live & is_decode[rows.row_of_token]
    out = jnp.where(is_decoded[:, None, None], decoded[rows.row_of_token], 0).astype(q.dtype)
    tiled_lens = jnp.where(is_decode, 0, rows.q_lens)
    return _tile_rows(context, q, out, rows.pages, rows.kv_lens, rows.starts, tiled_lens), kv_cache


def _decode_rows(
    context: _Context,
    q: Float[Array, "T N H"],
    pages: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    starts: Int32[Array, " R"],
) -> Float32[Array, "R N H"]:
    """Attention of the one query of each row that has kv_lens > 0; other rows: unspecified.

    All KV heads of a token take part in one product, as X = K * H: a query is zero but for the part
    of its own KV head. That is K times the multiplications, but pages are read as they lie, and
    where this runs, reading them is what takes the time.
    """
    layout, window = context.call.layout, context.call.sliding_window
    num_rows, num_heads, num_kv_heads = kv_lens.shape[0], q.shape[1], layout.num_kv_heads
    per_turn = max(1, min(_DECODE_CHUNK // layout.page_size, pages.shape[1]))
    chunk = per_turn * layout.page_size
    head_groups = jnp.arange(num_heads) // (num_heads // num_kv_heads)
    is_own = (head_groups[:, None] == jnp.arange(num_kv_heads))[:, :, None]
    queries = q[jnp.clip(starts, 0, q.shape[0] - 1)]
    queries = jnp.where(is_own, queries[:, :, None], 0).reshape(num_rows, num_heads, -1)

    def turn(state: tuple[Int32[Array, ""], _Softmax]) -> tuple[Int32[Array, ""], _Softmax]:
        i, softmax = state
        at = i * chunk + jnp.arange(chunk)
        mask = at < kv_lens[:, None]
        keys, values = _read_pages(context, pages, i * per_turn, per_turn, mask, q.dtype)
        if window is not None:
            mask &= at >= kv_lens[:, None] - window
        keys, values = (a.reshape(num_rows, chunk, -1) for a in (keys, values))
        return i + 1, _accumulate(context, softmax, queries, keys, values, mask[:, None])

    first = jnp.int32(0)
    if window is not None:
        window_starts = jnp.where(kv_lens > 0, kv_lens - window, 2**30)
        first = jnp.maximum(window_starts.min(), 0) // chunk
    last = -(-kv_lens.max() // chunk)
    initial = _initial(queries.shape, context.sinks)
    _, softmax = jax.lax.while_loop(lambda state: state[0] < last, turn, (first, initial))
    out = softmax.output().reshape(num_rows, num_heads, num_kv_heads, layout.head_dim)
    return jnp.where(is_own, out, 0).sum(axis=2)


def _tile_rows(
    context: _Context,
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"],
    pages: Int32[Array, "R B"],
    kv_lens: Int32[Array, " R"],
    starts: Int32[Array, " R"],
    q_lens: Int32[Array, " R"],
) -> Float[Array, "T N H"]:
    """`out` with the attention of rows of q_lens > 0 filled in, one tile of queries at a time."""
    num_tokens, tile = q.shape[0], min(_TILE, q.shape[0])
    num_tiles = -(-q_lens // tile)
    cu_tiles = jnp.cumsum(num_tiles)

    def one_tile(i: Int32[Array, ""], out: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        row = jnp.sum(cu_tiles <= i)
        begin = starts[row] + (i - (cu_tiles[row] - num_tiles[row])) * tile
        end = starts[row] + q_lens[row]
        at = jnp.clip(begin, 0, num_tokens - tile)  # a slice must not run over the end
        tokens = at + jnp.arange(tile)
        is_mine = (tokens >= begin) & (tokens < end)
        positions = jnp.where(is_mine, kv_lens[row] - (end - tokens), 0)
        queries = jax.lax.dynamic_slice_in_dim(q, at, tile)
        new = _attend_tile(context, queries, pages[row], positions)
        old = jax.lax.dynamic_slice_in_dim(out, at, tile)
        new = jnp.where(is_mine[:, None, None], new.astype(out.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, at, 0)

    return jax.lax.fori_loop(0, cu_tiles[-1], one_tile, out)


def _attend_tile(
    context: _Context,
    queries: Float[Array, "t N H"],
    row_pages: Int32[Array, " B"],
    positions: Int32[Array, " t"],
) -> Float32[Array, "t N H"]:
    """Attention of one row's queries at `positions` to all that the row has stored before them."""
    layout, window = context.call.layout, context.call.sliding_window
    tile, num_heads, head_dim = queries.shape
    num_kv_heads = layout.num_kv_heads
    group = num_heads // num_kv_heads
    per_turn = max(1, min(_TILE_CHUNK // layout.page_size, row_pages.shape[0]))
    chunk = per_turn * layout.page_size
    queries = queries.reshape(tile, num_kv_heads, group, head_dim)
    queries = queries.transpose(1, 0, 2, 3).reshape(num_kv_heads, tile * group, head_dim)
    newest = positions.max()

    def turn(i: Int32[Array, ""], softmax: _Softmax) -> _Softmax:
        at = i * chunk + jnp.arange(chunk)
        is_stored = (at <= newest)[None]
        keys, values = _read_pages(
            context, row_pages[None], i * per_turn, per_turn, is_stored, queries.dtype
        )
        keys, values = (a[0].transpose(1, 0, 2) for a in (keys, values))
        mask = at <= positions[:, None]
        if window is not None:
            mask &= at > positions[:, None] - window
        mask = jnp.repeat(mask, group, axis=0)[None]
        return _accumulate(context, softmax, queries, keys, values, mask)

    first = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(newest - tile - window, 0) // chunk
    sinks = context.sinks
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(num_kv_heads, group), tile)
    initial = _initial(queries.shape, sinks)
    softmax = jax.lax.fori_loop(first, newest // chunk + 1, turn, initial)
    new = softmax.output().reshape(num_kv_heads, tile, group, head_dim)
    return new.transpose(1, 0, 2, 3).reshape(tile, num_heads, head_dim)


def _initial(shape: tuple[int, ...], sinks: Float32[Array, "..."] | None) -> _Softmax:
    """Nothing seen yet but the sinks; `shape` is B, M, X and sinks broadcast to B, M."""
    acc = jnp.zeros(shape, jnp.float32)
    if sinks is None:
        return _Softmax(jnp.full(shape[:2], _MASKED), jnp.zeros(shape[:2]), acc)
    return _Softmax(jnp.broadcast_to(sinks, shape[:2]), jnp.ones(shape[:2]), acc)


def _read_pages(
    context: _Context,
    pages: Int32[Array, "R B"],
    start: Int32[Array, ""],
    count: int,
    is_stored: Bool[Array, "R C"],
    dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "R C K H"], Float[Array, "R C K H"]]:
    """K and V of pages start..start + count of each row, C tokens; past a row's table: any page.

    V is zero where not `is_stored`. `pages` must be in range.
    """
    columns = jnp.minimum(start + jnp.arange(count), pages.shape[1] - 1)
    read = functools.partial(_gather_pages, layer=context.layer, pages=pages[:, columns])
    layout = context.call.layout
    keys = split_heads(layout, read(context.kv_cache.k))
    values = split_heads(layout, read(context.kv_cache.v))
    if layout.dtype in QUANTIZED_DTYPES:
        keys = layout.decode(keys, context.k_scale).astype(dtype)
        values = layout.decode(values, context.v_scale).astype(dtype)
    return keys, jnp.where(is_stored[:, :, None, None], values, 0)


def _gather_pages(
    cache: Shaped[Array, "L P S ..."], layer: int | Int32[Array, ""], pages: Int32[Array, "R n"]
) -> Shaped[Array, "R C ..."]:
    """Pages of one layer, without a copy of that layer."""
    num_layers, num_pages = cache.shape[:2]
    flat = cache.reshape(num_layers * num_pages, *cache.shape[2:])
    gathered = flat.at[layer * num_pages + pages].get(mode="promise_in_bounds")
    return gathered.reshape(pages.shape[0], -1, *cache.shape[3:])


def _accumulate(
    context: _Context,
    softmax: _Softmax,
    queries: Float[Array, "B M X"],
    keys: Float[Array, "B C X"],
    values: Float[Array, "B C X"],
    mask: Bool[Array, "b m C"],
) -> _Softmax:
    """One turn of the running softmax over C more tokens; `mask` broadcasts to B, M."""
    dtype = jnp.promote_types(queries.dtype, keys.dtype)

    def product(
        spec: str, a: Float[Array, "B M _"], b: Float[Array, "B C X"]
    ) -> Float32[Array, "B M _"]:
        return jnp.einsum(
            spec,
            a.astype(dtype),
            b.astype(dtype),
            precision="highest" if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    scores = context.scale * product("bmx,bcx->bmc", queries, keys)
    soft_cap = context.call.soft_cap
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask, scores, _MASKED)
    peak = jnp.maximum(softmax.peak, scores.max(axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    faded = jnp.exp(softmax.peak - peak)
    return _Softmax(
        peak,
        softmax.total * faded + weights.sum(axis=-1),
        softmax.acc * faded[..., None] + product("bmc,bcx->bmx", weights, values),
    )
