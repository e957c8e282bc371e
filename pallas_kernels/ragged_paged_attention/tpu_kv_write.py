"""Writes a row's new K and V into the pages of a TPU's cache, from within a kernel.

Tokens lie in sublanes and a DMA moves whole tiles of these, so slots are written in chunks: a
chunk that is not all new is read from the cache first. New tokens may start at any sublane; they
are shifted to their slots as 32-bit words, each 1, 2 or 4 tokens of a lane, which works for every
dtype and leaves each bit as it is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32, Shaped, UInt32

from pallas_kernels.ragged_paged_attention.layout import KVCacheLayout
from pallas_kernels.ragged_paged_attention.tpu_common import LANES, page_id, write_group

_SLOTS = 3  # a chunk is read while the one before is merged and the one before that is written
_CHUNK_BYTES = 2**18  # of K; as many of V
_SUBLANES = 8


class WriteSizes(NamedTuple):
    """chunk: slots that are written together; they lie in one page.
    align: tokens that a DMA of new tokens starts at a multiple of.
    pack: tokens in a 32-bit word.
    """

    chunk: int
    align: int
    pack: int

    @property
    def fetched(self) -> int:
        """Tokens fetched for a chunk, which lie anywhere among them."""
        return -(-self.chunk // self.align) * self.align + self.align

    @property
    def buffer_len(self) -> int:
        """Tokens in a buffer: those fetched, between what is read with them and dropped."""
        margin = -(-self.chunk // self.align) * self.align
        return margin + self.fetched + margin + 2 * self.align


class WriteRefs(NamedTuple):
    """What `write_row` reads, writes and works in."""

    new: tuple[Any, Any]  # [T, X] in HBM: K and V
    caches: tuple[Any, Any]  # [L, P, S, X] in HBM: K and V
    chunks: Any  # [_SLOTS, 2, chunk, X]
    sources: Any  # [_SLOTS, 2, buffer_len, X]
    read_sems: Any  # [_SLOTS]
    write_sems: Any  # [_SLOTS]


class RowWrite(NamedTuple):
    """The new tokens of a row: `count` from token `start` on go to positions from `position` on."""

    start: Int32[Array, ""]
    position: Int32[Array, ""]
    num_new: Int32[Array, ""]


class _Chunk(NamedTuple):
    """Where a chunk is and what of it is new.

    token: what would be the token of its first slot; may be below zero.
    fetch: the first token fetched for it.
    new_from, new_to: its new slots.
    """

    page: Int32[Array, ""]
    slot: Int32[Array, ""]
    token: Int32[Array, ""]
    fetch: Int32[Array, ""]
    new_from: Int32[Array, ""]
    new_to: Int32[Array, ""]


def write_sizes(layout: KVCacheLayout) -> WriteSizes:
    """The largest chunk of a page that is worth one DMA, or all of it."""
    itemsize = layout.storage_dtype.itemsize
    chunk, group = layout.page_size, write_group(layout)
    while chunk % (2 * group) == 0 and chunk * layout.token_width * itemsize > _CHUNK_BYTES:
        chunk //= 2
    return WriteSizes(chunk, 8 * 4 // itemsize, 4 // itemsize)


def pad_new(sizes: WriteSizes, new: Shaped[Array, "T X"]) -> Shaped[Array, "T2 X"]:
    """New K or V with as many tokens as `write_row` needs."""
    length = max(-(-new.shape[0] // sizes.align) * sizes.align, sizes.fetched)
    bits = jax.lax.bitcast_convert_type(new, f"uint{8 * new.dtype.itemsize}")
    bits = jnp.pad(bits, ((0, length - new.shape[0]), (0, 0)))
    return jax.lax.bitcast_convert_type(bits, new.dtype)


def write_scratch(sizes: WriteSizes, layout: KVCacheLayout) -> list[Any]:
    """The last four of `WriteRefs`."""
    width, dtype = layout.token_width, layout.storage_dtype
    return [
        pltpu.VMEM((_SLOTS, 2, sizes.chunk, width), dtype),
        pltpu.VMEM((_SLOTS, 2, sizes.buffer_len, width), dtype),
        pltpu.SemaphoreType.DMA((_SLOTS,)),
        pltpu.SemaphoreType.DMA((_SLOTS,)),
    ]


def write_row(
    refs: WriteRefs, sizes: WriteSizes, layer: Int32[Array, ""], table_ref: Any, row: RowWrite
) -> None:
    """Writes the row's new tokens into one layer of the caches; done when it returns.

    table_ref: [C, 128] page ids in SMEM.
    """
    page_size = refs.caches[0].shape[2]
    num_fetchable = refs.new[0].shape[0]
    first = row.position // sizes.chunk
    last = (row.position + row.num_new - 1) // sizes.chunk

    def chunk_at(i: Int32[Array, ""]) -> _Chunk:
        base = i * sizes.chunk
        token = row.start + base - row.position
        fetch = jnp.maximum(token, 0) // sizes.align * sizes.align
        fetch = jnp.minimum(fetch, num_fetchable - sizes.fetched)
        return _Chunk(
            page=page_id(table_ref, base // page_size),
            slot=base % page_size,
            token=token,
            fetch=fetch,
            new_from=jnp.maximum(row.position - base, 0),
            new_to=jnp.minimum(row.position + row.num_new - base, sizes.chunk),
        )

    def is_whole(chunk: _Chunk) -> Array:
        return (chunk.new_from == 0) & (chunk.new_to == sizes.chunk)

    def reads(i: Int32[Array, ""], method: str) -> None:
        chunk, buffer = chunk_at(i), (i - first) % _SLOTS
        for which in range(2):
            getattr(_fetch(refs, sizes, chunk, buffer, which), method)()

        @pl.when(~is_whole(chunk))
        def _() -> None:
            for which in range(2):
                in_cache, in_vmem = _places(refs, sizes, layer, chunk, buffer, which)
                sem = refs.read_sems.at[buffer]
                getattr(pltpu.make_async_copy(in_cache, in_vmem, sem), method)()

    def writes(i: Int32[Array, ""], method: str) -> None:
        chunk, buffer = chunk_at(i), (i - first) % _SLOTS
        for which in range(2):
            in_cache, in_vmem = _places(refs, sizes, layer, chunk, buffer, which)
            sem = refs.write_sems.at[buffer]
            getattr(pltpu.make_async_copy(in_vmem, in_cache, sem), method)()

    def turn(i: Int32[Array, ""], _: None) -> None:
        @pl.when(i - 2 >= first)
        def _() -> None:
            writes(i - 2, "wait")

        @pl.when(i < last)
        def _() -> None:
            reads(i + 1, "start")

        reads(i, "wait")
        _merge(refs, sizes, chunk_at(i), (i - first) % _SLOTS)
        writes(i, "start")

    reads(first, "start")
    jax.lax.fori_loop(first, last + 1, turn, None)

    @pl.when(last > first)
    def _() -> None:
        writes(last - 1, "wait")

    writes(last, "wait")


def _margin(sizes: WriteSizes) -> int:
    """Where in its buffer the first token fetched lies."""
    return sizes.fetched - sizes.align


def _fetch(
    refs: WriteRefs, sizes: WriteSizes, chunk: _Chunk, buffer: Int32[Array, ""], which: int
) -> Any:
    """The DMA of a chunk's new tokens."""
    fetch = pl.multiple_of(chunk.fetch, sizes.align)
    return pltpu.make_async_copy(
        refs.new[which].at[pl.ds(fetch, sizes.fetched)],
        refs.sources.at[buffer, which, pl.ds(_margin(sizes), sizes.fetched)],
        refs.read_sems.at[buffer],
    )


def _places(
    refs: WriteRefs,
    sizes: WriteSizes,
    layer: Int32[Array, ""],
    chunk: _Chunk,
    buffer: Int32[Array, ""],
    which: int,
) -> tuple[Any, Any]:
    """A chunk in the cache and in VMEM."""
    slots = pl.ds(pl.multiple_of(chunk.slot, sizes.chunk), sizes.chunk)
    return refs.caches[which].at[layer, chunk.page, slots], refs.chunks.at[buffer, which]


def _merge(refs: WriteRefs, sizes: WriteSizes, chunk: _Chunk, buffer: Int32[Array, ""]) -> None:
    """Puts the new tokens of a chunk in their slots, in VMEM."""
    num_words = sizes.chunk // sizes.pack
    rows = min(num_words, _SUBLANES)
    token = chunk.token - chunk.fetch + _margin(sizes)
    word, part = token // sizes.pack, token % sizes.pack
    bits = (part * (32 // sizes.pack)).astype(jnp.uint32)

    def turn(i: Int32[Array, ""], _: None) -> None:
        at = pl.multiple_of(i * rows, rows)
        slots = pl.ds(pl.multiple_of(at * sizes.pack, rows * sizes.pack), rows * sizes.pack)
        for which in range(2):
            source = refs.sources.at[buffer, which]
            new = _words(sizes, source, word + at, rows)
            if sizes.pack > 1:  # in two shifts, as one by 32 is not defined
                after = _words(sizes, source, word + at + 1, rows)
                new = (new >> bits) | ((after << (jnp.uint32(31) - bits)) << jnp.uint32(1))
            old = pltpu.bitcast(refs.chunks[buffer, which, slots], jnp.uint32)
            is_new = _bits_of(sizes.pack, at, new.shape, chunk.new_from, chunk.new_to)
            merged = (new & is_new) | (old & ~is_new)
            refs.chunks[buffer, which, slots] = pltpu.bitcast(merged, refs.chunks.dtype)

    jax.lax.fori_loop(0, num_words // rows, turn, None)


def _words(
    sizes: WriteSizes, ref: Any, start: Int32[Array, ""], rows: int
) -> UInt32[Array, "rows X"]:
    """Tokens [_, X] as words, from word `start` on; what is loaded starts at whole tiles."""
    tile = start // _SUBLANES
    shift = start % _SUBLANES
    back = (_SUBLANES - shift) % _SUBLANES

    def rolled(tile: Int32[Array, ""]) -> UInt32[Array, "8 X"]:
        tokens = pl.ds(pl.multiple_of(tile * sizes.align, sizes.align), sizes.align)
        return pltpu.roll(pltpu.bitcast(ref[tokens], jnp.uint32), back, 0)

    here, after = rolled(tile), rolled(tile + 1)
    sublane = jax.lax.broadcasted_iota(jnp.int32, here.shape, 0)
    return jnp.where(sublane < _SUBLANES - shift, here, after)[:rows]


def _bits_of(
    pack: int,
    at: Int32[Array, ""],
    shape: tuple[int, ...],
    start: Int32[Array, ""] | int,
    end: Int32[Array, ""],
) -> UInt32[Array, "rows X"]:
    """All ones in those parts of words that are tokens start..end, words counted from `at`."""
    rows, width = shape
    token = (at + jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)) * pack
    part_bits = 32 // pack
    bits = jnp.zeros((rows, LANES), jnp.uint32)
    for part in range(pack):
        is_in = (token + part >= start) & (token + part < end)
        ones = np.uint32(((1 << part_bits) - 1) << (part * part_bits))
        bits |= jnp.where(is_in, ones, np.uint32(0))
    return jnp.concatenate([bits] * (width // LANES), axis=1)


def keep_tokens(page_ref: Any, count: Int32[Array, ""]) -> None:
    """Zeroes all but the first `count` tokens of a page [S, X] in VMEM."""
    pack = 4 // page_ref.dtype.itemsize
    num_words = page_ref.shape[0] // pack
    rows = min(num_words, _SUBLANES)

    def turn(i: Int32[Array, ""], _: None) -> None:
        slots = pl.ds(pl.multiple_of(i * rows * pack, rows * pack), rows * pack)
        words = pltpu.bitcast(page_ref[slots], jnp.uint32)
        words &= _bits_of(pack, i * rows, words.shape, 0, count)
        page_ref[slots] = pltpu.bitcast(words, page_ref.dtype)

    jax.lax.fori_loop(0, num_words // rows, turn, None)
