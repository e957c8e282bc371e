"""What the TPU kernels for decode and for prefill share.

- `TpuCall`: what both are given of a call, made by `tpu.py`.
- `copy_page`, `table_chunks`, `copy_table_chunk`, `page_id`: DMA descriptors of pages and of block
  tables, and the look-up in a block table that lies in SMEM.
- `compute_dtype`, `dequantize`, `precision`: what products are computed in, and 8-bit elements as
  that.
- `write_group`: slots that a write to a page must come in.
- `MASKED`, `kv_head_of_rows`, `factors`: numbers of the softmax.
- `divide`: of scalars.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.ragged_paged_attention.layout import QUANTIZED_DTYPES, KVCacheLayout
from pallas_kernels.ragged_paged_attention.specs import AttentionCall

LANES = 128
MASKED = -1e30  # a score that is not; finite, so that no difference of two scores is NaN
_TABLE_ROWS = 8  # of 128 page ids, that one DMA brings of a table longer than that


class TpuCall(NamedTuple):
    """A call as `tpu.py` hands it to a kernel, but for the arrays that are updated in place.

    layer, num_rows: one entry; num_rows is within 0..R.
    kv_lens, cu_q_lens: entries past num_rows may hold anything.
    tables: page ids [C, 128] of each row, in range everywhere; C is at most 8 or a multiple of 8.
    q: padding tokens may hold anything.
    k_new, v_new: this step's K and V of each token as the cache stores them.
    score_factors: what q.k of each query head is multiplied by, `scale` and `k_scale` together.
    out_factors: what the output of each query head is multiplied by, or None.
    """

    call: AttentionCall
    layer: Int32[Array, "1"]
    num_rows: Int32[Array, "1"]
    kv_lens: Int32[Array, " R"]
    cu_q_lens: Int32[Array, " R+1"]
    tables: Int32[Array, "R C 128"]
    q: Float[Array, "T N H"]
    k_new: Shaped[Array, "T X"]
    v_new: Shaped[Array, "T X"]
    sinks: Float32[Array, " N"] | None
    score_factors: Float32[Array, " N"]
    out_factors: Float32[Array, " N"] | None


def divide(x: Int32[Array, ""], by: int) -> Int32[Array, ""]:
    """x // by for x >= 0; signs cost a dozen scalar operations."""
    return x >> (by.bit_length() - 1) if by & (by - 1) == 0 else jax.lax.div(x, jnp.int32(by))


def write_group(layout: KVCacheLayout) -> int:
    """Slots of a page that are written together: no DMA moves less than a tile of sublanes."""
    return math.gcd(8 * 4 // layout.storage_dtype.itemsize, layout.page_size)


def pack_tables(block_tables: Int32[Array, "R B"], num_pages: int) -> Int32[Array, "R C 128"]:
    """Block tables as `TpuCall` has them, from ones that hold any int32 in dead entries."""
    rows, columns = block_tables.shape
    num_chunk_rows = pl.cdiv(columns, LANES)
    if num_chunk_rows > _TABLE_ROWS:
        num_chunk_rows = pl.cdiv(num_chunk_rows, _TABLE_ROWS) * _TABLE_ROWS
    padding = num_chunk_rows * LANES - columns
    tables = jnp.pad(jnp.clip(block_tables, 0, num_pages - 1), ((0, 0), (0, padding)))
    return tables.reshape(rows, num_chunk_rows, LANES)


def table_chunks(tables_ref: Any, num_pages: Int32[Array, ""]) -> Int32[Array, ""]:
    """DMAs that bring the first `num_pages` entries of a row's table."""
    chunk = min(_TABLE_ROWS, tables_ref.shape[1]) * LANES
    return divide(num_pages + (chunk - 1), chunk)


def copy_table_chunk(
    tables_ref: Any, row: Int32[Array, ""], chunk: Int32[Array, ""], smem_ref: Any, sem: Any
) -> Any:
    """A DMA of one chunk of a row's table.

    tables_ref: [R, C, 128] in HBM.
    smem_ref: [C, 128] in SMEM.
    """
    rows = min(_TABLE_ROWS, tables_ref.shape[1])
    part = pl.ds(pl.multiple_of(chunk * rows, rows), rows)
    return pltpu.make_async_copy(tables_ref.at[row, part], smem_ref.at[part], sem)


def page_id(smem_ref: Any, index: Int32[Array, ""]) -> Int32[Array, ""]:
    """Entry `index` of a table in SMEM, [C, 128]."""
    return smem_ref[index >> 7, index & (LANES - 1)]


def copy_page(
    cache_ref: Any, layer: Int32[Array, ""], page: Int32[Array, ""], buffer_ref: Any, sem: Any
) -> Any:
    """A DMA of one page.

    cache_ref: [L, P, S, X] in HBM.
    buffer_ref: [S, X] in VMEM.
    """
    return pltpu.make_async_copy(cache_ref.at[layer, page], buffer_ref, sem)


def compute_dtype(call: AttentionCall) -> np.dtype:
    """The dtype of both operands of a product of queries and keys, of weights and values."""
    layout = call.layout
    cache = call.q_dtype if layout.dtype in QUANTIZED_DTYPES else layout.dtype
    return jnp.promote_types(call.q_dtype, cache)


def precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """How precise a product of two operands of `dtype` must be asked to be, to be exact in it."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def dequantize(
    elements: Shaped[Array, "*C"], layout: KVCacheLayout, dtype: jax.typing.DTypeLike
) -> Float[Array, "*C"]:
    """Elements of the cache's arrays in a compute dtype, not scaled."""
    if layout.storage_dtype != layout.dtype:
        elements = pltpu.bitcast(elements, layout.dtype)
    return elements.astype(dtype)


def kv_head_of_rows(
    num_heads: int, num_kv_heads: int, shape: tuple[int, int]
) -> Int32[Array, "N _"]:
    """The KV head of each query head, one a row of `shape`."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) // (num_heads // num_kv_heads)


def factors(
    call: AttentionCall,
    scale: float,
    k_scale: Float32[Array, " K"] | None,
    v_scale: Float32[Array, " K"] | None,
) -> tuple[Float32[Array, " N"], Float32[Array, " N"] | None]:
    """`score_factors` and `out_factors` of a `TpuCall`."""
    group = call.num_heads // call.layout.num_kv_heads
    score = jnp.full(call.num_heads, scale, jnp.float32)
    if k_scale is not None:
        score *= jnp.repeat(k_scale, group)
    return score, None if v_scale is None else jnp.repeat(v_scale, group)
