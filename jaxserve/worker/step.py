"""The jitted step: apply a delta, run the model, sample, write the new tokens back."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from jaxserve.config import ModelInfo
from jaxserve.models.registry import Params, model_for
from jaxserve.worker.batch_state import advance, apply_writes, read_rows, unpack_delta
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.sampler import sample
from pallas_kernels.ragged_paged_attention import KVCache, KVCacheLayout, ragged_paged_attention


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """All that is static in a step but the bucket."""

    info: ModelInfo
    layout: KVCacheLayout
    attention: str


class DeviceState(NamedTuple):
    """What lives on the device between steps; every step donates it and returns it changed.

    Its leaves are arrays, or what stands for arrays in JAX, as in `KVCache`.
    """

    table: Any  # Int32[Array, "lines C"]
    kv_cache: KVCache


def forward(
    spec: StepSpec, bucket: Bucket, params: Params, state: DeviceState, buffer: Int32[Array, " D"]
) -> tuple[Float32[Array, "R V"], DeviceState]:
    """Applies the delta's writes, computes its tokens, and scores the next token of each row.

    The logits of rows that do not sample, and of padding, are those of some other token.
    """
    delta = unpack_delta(buffer, bucket)
    table = apply_writes(state.table, delta.addresses, delta.values)
    rows = read_rows(table, delta.rows)

    tokens = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    row_of_token = jnp.searchsorted(delta.cu_q_lens[1:], tokens, side="right", method="compare_all")
    row_of_token = jnp.minimum(row_of_token, bucket.num_rows - 1)
    token_ids = jnp.where(delta.token_ids < 0, rows.last_token[row_of_token], delta.token_ids)
    positions = rows.num_computed[row_of_token] + tokens - delta.cu_q_lens[row_of_token]
    kv_lens = rows.num_computed + delta.cu_q_lens[1:] - delta.cu_q_lens[:-1]

    def attend(
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_cache: KVCache,
        layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        return ragged_paged_attention(
            q,
            k,
            v,
            kv_cache,
            layer,
            rows.block_tables,
            kv_lens,
            delta.cu_q_lens,
            delta.num_rows[0],
            layout=spec.layout,
            scale=spec.info.head_dim**-0.5,
            implementation=spec.attention,
        )

    model = model_for(spec.info)
    hidden, kv_cache = model.forward(
        params, spec.info, token_ids, positions, state.kv_cache, attend
    )
    last_tokens = jnp.maximum(delta.cu_q_lens[1:] - 1, 0)
    logits = model.logits(params, spec.info, hidden[last_tokens])
    return logits, DeviceState(table, kv_cache)


def sample_and_advance(
    bucket: Bucket,
    logits: Float32[Array, "R V"],
    table: Int32[Array, "lines C"],
    buffer: Int32[Array, " D"],
) -> tuple[Int32[Array, " R"], Int32[Array, "lines C"]]:
    """Samples from `forward`'s logits and moves the table on; the writes are already applied."""
    delta = unpack_delta(buffer, bucket)
    rows = read_rows(table, delta.rows)
    num_tokens = rows.num_computed + delta.cu_q_lens[1:] - delta.cu_q_lens[:-1]
    sampled = sample(logits, rows, num_tokens)
    return sampled, advance(table, delta, sampled)


def step(
    spec: StepSpec, bucket: Bucket, params: Params, state: DeviceState, buffer: Int32[Array, " D"]
) -> tuple[Int32[Array, " R"], DeviceState]:
    """`forward` and `sample_and_advance` as one program: sampled tokens in batch row order."""
    logits, state = forward(spec, bucket, params, state, buffer)
    sampled, table = sample_and_advance(bucket, logits, state.table, buffer)
    return sampled, DeviceState(table, state.kv_cache)
