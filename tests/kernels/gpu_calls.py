"""Calls of the GPU kernels as `gpu.py` hands them on, for tests of one kernel alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.layout import from_logical
from pallas_kernels.ragged_paged_attention.rows import Rows, find_rows
from pallas_kernels.ragged_paged_attention.specs import AttentionCall
from tests.kernels.cases import Case, Config


def attention_call(config: Config, num_cores: int) -> AttentionCall:
    """num_cores: multiprocessors, as few as make the kernel do what is to be tested."""
    return AttentionCall(
        config.layout,
        dataclasses.replace(CHIPS[config.chip], num_cores=num_cores),
        config.num_heads,
        jnp.dtype(config.q_dtype),
        config.sliding_window,
        config.soft_cap,
        config.has_sinks,
        config.has_scales,
    )


def rows_of(case: Case) -> Rows:
    """The rows as `gpu.py` plans with them."""
    config = case.config
    arrays = (case.block_tables, case.kv_lens, case.cu_q_lens, np.int32(len(case.rows)))
    return find_rows(*(config.layout, len(case.q), config.num_pages), *map(jnp.asarray, arrays))


def gpu_call(case: Case, num_cores: int) -> GpuCall:
    """The call; the cache holds the new tokens already."""
    config = case.config
    arrays = dict(
        q=case.q,
        kv_cache=from_logical(config.layout, jnp.asarray(case.k_after), jnp.asarray(case.v_after)),
        layer=np.int32(case.layer),
        pages=rows_of(case).pages,
        sinks=case.options.sinks,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    return GpuCall(
        **jax.tree.map(jnp.asarray, arrays),
        call=attention_call(config, num_cores),
        scale=case.options.scale,
    )
