"""Sampling on the device: every row by its own rules, from its own random numbers.

Filters are thresholds: a token stays if its logit is at least the row's threshold, so equal logits
share a fate. A draw is one uniform number, made from the row's seed and the position of the token,
carried through the cumulative weights in vocabulary order. So a row's token depends on its logits,
seed and position, and on nothing else in the batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Int32, UInt32

from jaxserve.worker.batch_state import RowFields
from jaxserve.worker.row_options import RowOptions, bar_bad_words, bar_by_masks
from jaxserve.worker.sharding import keep_whole, vocab_parts

_TILE = 256  # vocabulary entries summed at once on the way to a draw


def sample(
    logits: Float32[Array, "R V"],
    rows: RowFields,
    num_tokens: Int32[Array, " R"],
    mesh: Mesh,
) -> Int32[Array, " R"]:
    """One token a row.

    num_tokens: tokens the row has before the new one; the new token's position.
    mesh: of the devices, which hold the logits as `sharding.by_vocab` says.
    Padding rows may hold any finite logits; their token is unspecified.
    """
    logits = bar_stop_tokens(logits, rows, num_tokens)
    return _choose(logits, rows, num_tokens, mesh)


def sample_with_options(
    logits: Float32[Array, "R V"],
    rows: RowFields,
    num_tokens: Int32[Array, " R"],
    options: RowOptions,
    mask: Int32[Array, "R W"],
    shape: Callable[[Float32[Array, "R V"]], Float32[Array, "R V"]],
    mesh: Mesh,
) -> Int32[Array, " R"]:
    """As `sample`, from what `apply_options` makes of the logits."""
    logits = apply_options(logits, rows, num_tokens, options, mask, shape, mesh)
    return _choose(logits, rows, num_tokens, mesh)


def apply_options(
    logits: Float32[Array, "R V"],
    rows: RowFields,
    num_tokens: Int32[Array, " R"],
    options: RowOptions,
    mask: Int32[Array, "R W"],
    shape: Callable[[Float32[Array, "R V"]], Float32[Array, "R V"]],
    mesh: Mesh,
) -> Float32[Array, "R V"]:
    """The logits after everything that comes before the temperature.

    Order: mask and allowed tokens; bad words and min_tokens, unless they leave nothing; `shape`,
    which is bias, penalties and logits processors.
    """
    masked = bar_by_masks(logits, options, mask, mesh)

    def bar_and_shape() -> Float32[Array, "R V"]:
        barred = jax.lax.cond(
            (options.bad_words != 0).any(),
            lambda: bar_bad_words(masked, options),
            lambda: masked,
        )
        barred = bar_stop_tokens(barred, rows, num_tokens)
        is_nothing = jnp.isneginf(barred).all(axis=-1, keepdims=True)
        return shape(jnp.where(is_nothing, masked, barred))

    is_needed = (rows.has_options != 0) | (num_tokens < rows.min_len)
    return jax.lax.cond(is_needed.any(), bar_and_shape, lambda: masked)


def bar_stop_tokens(
    logits: Float32[Array, "R V"], rows: RowFields, num_tokens: Int32[Array, " R"]
) -> Float32[Array, "R V"]:
    """-inf for the stop token ids of rows that are still below their min_len."""
    return jax.lax.cond(
        (num_tokens < rows.min_len).any(),
        lambda: _bar_stop_tokens(logits, rows, num_tokens),
        lambda: logits,
    )


def _choose(
    logits: Float32[Array, "R V"],
    rows: RowFields,
    num_tokens: Int32[Array, " R"],
    mesh: Mesh,
) -> Int32[Array, " R"]:
    """The likeliest token where the temperature is 0, else a random one."""
    greedy = _argmax(logits, mesh)
    is_greedy = rows.temperature == 0
    return jax.lax.cond(
        is_greedy.all(),
        lambda: greedy,
        lambda: jnp.where(is_greedy, greedy, _draw_rows(logits, rows, num_tokens, mesh)),
    )


def _argmax(logits: Float32[Array, "R V"], mesh: Mesh) -> Int32[Array, " R"]:
    """The first of the largest. XLA takes entries one by one on a CPU, but sees a tile's largest by
    vectors, so that only a row's best tile is searched."""
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    num_rows, vocab_size = logits.shape
    padding = ((0, 0), (0, -vocab_size % _TILE))
    tiles = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(num_rows, -1, _TILE)
    tile = jnp.argmax(tiles.max(axis=-1), axis=-1)
    best = tiles[jnp.arange(num_rows), tile]
    return (tile * _TILE + jnp.argmax(best, axis=-1)).astype(jnp.int32)


def _bar_stop_tokens(
    logits: Float32[Array, "R V"], rows: RowFields, num_tokens: Int32[Array, " R"]
) -> Float32[Array, "R V"]:
    is_barred = (num_tokens < rows.min_len)[:, None] & (rows.stop_token_ids >= 0)
    columns = jnp.where(is_barred, rows.stop_token_ids, logits.shape[1])
    lines = jnp.arange(logits.shape[0])[:, None]
    return logits.at[lines, columns].set(-jnp.inf, mode="drop")


def _draw_rows(
    logits: Float32[Array, "R V"],
    rows: RowFields,
    num_tokens: Int32[Array, " R"],
    mesh: Mesh,
) -> Int32[Array, " R"]:
    """One random token a row, by temperature, min_p, top_k and top_p, applied in that order."""
    # Computed once, never again in a fusion that rounds otherwise: thresholds need equality.
    scaled = logits / jnp.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
    scaled = jax.lax.optimization_barrier(scaled)
    scaled = jax.lax.optimization_barrier(scaled - scaled.max(axis=-1, keepdims=True))
    threshold = jnp.where(rows.min_p > 0, jnp.log(rows.min_p), -jnp.inf)

    is_random = rows.temperature > 0
    has_top_k = is_random & (rows.top_k > 0) & (rows.top_k < logits.shape[1])
    threshold = jax.lax.cond(
        has_top_k.any(),
        lambda: jnp.where(
            has_top_k, jnp.maximum(threshold, _top_k_threshold(scaled, rows.top_k)), threshold
        ),
        lambda: threshold,
    )
    has_top_p = is_random & (rows.top_p < 1)
    threshold = jax.lax.cond(
        has_top_p.any(),
        lambda: jnp.where(
            has_top_p,
            jnp.maximum(threshold, _top_p_threshold(scaled, threshold, rows.top_p)),
            threshold,
        ),
        lambda: threshold,
    )
    weights = jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0)
    return _inverse_cdf(weights, jax.vmap(_uniform)(rows.seed, num_tokens), mesh)


def _uniform(seed: UInt32[Array, " 2"], position: Int32[Array, ""]) -> Float32[Array, ""]:
    """In [0, 1), the same for the same seed and position on every platform (threefry)."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def _top_k_threshold(
    scaled: Float32[Array, "R V"], top_k: Int32[Array, " R"]
) -> Float32[Array, " R"]:
    """The top_k-th largest logit of each row."""

    def is_enough(candidates: Float32[Array, " R"]) -> Bool[Array, " R"]:
        return (scaled >= candidates[:, None]).sum(axis=-1) >= top_k

    return _largest_threshold(is_enough, scaled.shape[0])


def _top_p_threshold(
    scaled: Float32[Array, "R V"], floor: Float32[Array, " R"], top_p: Float32[Array, " R"]
) -> Float32[Array, " R"]:
    """The logit at which the likeliest tokens first hold top_p of the weight at or above floor."""
    weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0)
    wanted = top_p * weights.sum(axis=-1)

    def is_enough(candidates: Float32[Array, " R"]) -> Bool[Array, " R"]:
        return jnp.where(scaled >= candidates[:, None], weights, 0).sum(axis=-1) >= wanted

    return _largest_threshold(is_enough, scaled.shape[0])


def _largest_threshold(
    is_enough: Callable[[Float32[Array, " R"]], Bool[Array, " R"]], num_rows: int
) -> Float32[Array, " R"]:
    """The largest float32 at most 0 that is enough, by bisection over the float's bits.

    The largest logit is 0, so a candidate above 0 keeps nothing. Exact, and made of row-wise sums
    only: on a vocabulary split over devices each sum is one small all-reduce.
    """

    def value(bits: Int32[Array, " R"]) -> Float32[Array, " R"]:
        return -jax.lax.bitcast_convert_type(bits, jnp.float32)  # bits rise as the value falls

    def halve(
        _: Int32[Array, ""], bounds: tuple[Int32[Array, " R"], Int32[Array, " R"]]
    ) -> tuple[Int32[Array, " R"], Int32[Array, " R"]]:
        low, high = bounds  # high is enough
        middle = low + (high - low) // 2
        enough = is_enough(value(middle))
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    infinity = jnp.full(num_rows, 0x7F800000, jnp.int32)  # bits of +inf: keeps everything
    _, bits = jax.lax.fori_loop(0, 31, halve, (jnp.zeros(num_rows, jnp.int32), infinity))
    return value(bits)


def _inverse_cdf(
    weights: Float32[Array, "R V"], uniform: Float32[Array, " R"], mesh: Mesh
) -> Int32[Array, " R"]:
    """The index at which the running sum of weights passes uniform * total; two levels of sums, the
    lower one of tiles that each lie on one device."""
    num_rows, vocab_size = weights.shape
    num_parts = vocab_parts(vocab_size, mesh)
    part_len = vocab_size // num_parts
    num_tiles = -(-part_len // _TILE)  # of a part
    tiles = weights.reshape(num_rows, num_parts, part_len)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, num_tiles * _TILE - part_len)))
    tiles = tiles.reshape(num_rows, num_parts * num_tiles, _TILE)
    sums = keep_whole(mesh, tiles.sum(axis=-1))
    running = jnp.cumsum(sums, axis=-1)
    target = uniform * running[:, -1]
    tile = _first_passing(running, sums, target)
    lines = jnp.arange(num_rows)
    inner = keep_whole(mesh, tiles[lines, tile])
    before = running[lines, tile] - sums[lines, tile]
    place = tile * _TILE + _first_passing(jnp.cumsum(inner, axis=-1), inner, target - before)
    if num_parts > 1:  # without what pads the parts before
        place -= tile // num_tiles * (num_tiles * _TILE - part_len)
    return place


def _first_passing(
    running: Float32[Array, "R X"], weights: Float32[Array, "R X"], target: Float32[Array, " R"]
) -> Int32[Array, " R"]:
    """The first index with weight whose running sum exceeds target; else the last with weight,
    which happens when rounding lifts the target to the total."""
    passes = (running > target[:, None]) & (weights > 0)
    first = jnp.argmax(passes, axis=-1)
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(passes.any(axis=-1), first, last).astype(jnp.int32)
