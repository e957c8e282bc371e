"""Calls of the GPU kernels as `gpu.py` hands them on, for tests of one kernel alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from pallas_kernels.chips import CHIPS
from pallas_kernels.ragged_paged_attention.gpu_call import GpuCall
from pallas_kernels.ragged_paged_attention.layout import from_logical
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


def num_new_tokens(case: Case) -> np.ndarray:
    """Of each row, 0 for padding."""
    is_live = np.arange(case.config.max_rows) < len(case.rows)
    return np.where(is_live, case.cu_q_lens[1:] - case.cu_q_lens[:-1], 0)


def gpu_call(case: Case, takes_part: Bool[np.ndarray, " R"], num_cores: int) -> GpuCall:
    """The call with the rows that take part; the cache holds the new tokens already."""
    config = case.config
    arrays = dict(
        q=case.q,
        kv_cache=from_logical(config.layout, jnp.asarray(case.k_after), jnp.asarray(case.v_after)),
        layer=np.int32(case.layer),
        pages=np.clip(case.block_tables, 0, config.num_pages - 1),
        kv_lens=np.where(takes_part, case.kv_lens, 0),
        starts=np.where(takes_part, case.cu_q_lens[:-1], 0),
        q_lens=np.where(takes_part, num_new_tokens(case), 0),
        sinks=case.options.sinks,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    return GpuCall(
        **jax.tree.map(jnp.asarray, arrays),
        call=attention_call(config, num_cores),
        scale=case.options.scale,
    )
