"""The two programs of a step: `forward` applies a delta and runs the model; `sample_step` samples
from its logits and writes the new tokens back.

They are two so that a grammar's mask can be made while the model runs, and so that the sampler is
compiled once a number of rows, not once a bucket.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Float32, Int32

from jaxserve.config import ModelInfo
from jaxserve.models.layers import Matmul, linear
from jaxserve.models.partition import partition
from jaxserve.models.registry import Linear, Params, model_for
from jaxserve.worker.batch_state import (
    advance,
    apply_writes,
    read_rows,
    set_last_tokens,
    unpack_delta,
)
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.row_options import (
    OptionSpec,
    OptionState,
    count_tokens,
    read_options,
    shape_logits,
)
from jaxserve.worker.sampler import sample, sample_with_options
from jaxserve.worker.sharding import keep_whole, kv_cache_spec, num_parts
from pallas_kernels.chips import Chip
from pallas_kernels.matmul import NOTHING_FUSED, Fused, Int8Weights, matmul
from pallas_kernels.ragged_paged_attention import (
    AttentionCall,
    KVCache,
    KVCacheLayout,
    RopeTables,
    attend_packed,
    plan_attention,
)


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """All that is static in a step but the bucket.

    layout: of each device's share of the KV cache.  dtype: of weights and activations.
    matmul: implementation of products with weights: "auto", by their shapes, or its name.
    max_num_tokens: token slots of the largest bucket.
    """

    info: ModelInfo
    layout: KVCacheLayout
    chip: Chip
    attention: str
    matmul: str
    dtype: jax.typing.DTypeLike
    max_num_tokens: int
    mesh: Mesh


class DeviceState(NamedTuple):
    """What `forward` donates and returns changed.

    Its leaves are arrays, or what stands for arrays in JAX, as in `KVCache`.
    hidden: the hidden states of the last step's tokens, from the first on.
    """

    table: Any  # Int32[Array, "lines C"]
    kv_cache: KVCache
    hidden: Any  # Float[Array, "T D"]


def forward(
    spec: StepSpec, bucket: Bucket, params: Params, state: DeviceState, buffer: Int32[Array, " D"]
) -> tuple[Float32[Array, "R V"], Int32[Array, " R"], DeviceState]:
    """Applies the delta's writes, computes its tokens, and scores the next token of each row.

    Returns the logits, the table line of each row that samples (past the table's end for rows that
    do not, and for padding), and the state. The logits of rows that do not sample, and of padding,
    are those of some other token.
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
    where = (rows.block_tables, kv_lens, delta.cu_q_lens, delta.num_rows[0])
    plan = plan_attention(
        *(_attention_call(spec), bucket.num_tokens, spec.layout.num_pages(state.kv_cache), *where),
        implementation=spec.attention,
    )

    def attend(
        qkv: Float[Array, "T K C H"],
        tables: RopeTables,
        kv_cache: KVCache,
        layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        return attention(qkv, tables, kv_cache, layer, *where, plan)

    attention = _attention_on_mesh(spec)
    model = model_for(spec.info)
    linears = _linears(spec, _matmul(spec, delta.cu_q_lens[-1]))
    hidden, kv_cache = model.forward(
        params, spec.info, token_ids, positions, state.kv_cache, attend, *linears
    )
    last_tokens = jnp.maximum(delta.cu_q_lens[1:] - 1, 0)
    matmul = _matmul(spec, delta.num_rows[0])
    logits = model.logits(params, spec.info, hidden[last_tokens], matmul)
    sampling_rows = jnp.where(delta.samples.astype(bool), delta.rows, table.shape[0])
    kept = jax.lax.dynamic_update_slice(state.hidden, hidden, (0, 0))
    return logits, sampling_rows, DeviceState(advance(table, delta), kv_cache, kept)


def _attention_call(spec: StepSpec) -> AttentionCall:
    """What each device is asked."""
    cut = partition(spec.info, num_parts(spec.mesh))
    num_heads = cut.q_heads.size // cut.num_parts
    return AttentionCall(spec.layout, spec.chip, num_heads, jnp.dtype(spec.dtype))


def _attention_on_mesh(
    spec: StepSpec,
) -> Callable[..., tuple[Float[Array, "T N H"], KVCache]]:
    """`attend_packed` of all heads, its plan last; each device computes those it has."""

    def attention(*args: Any) -> tuple[Float[Array, "T N H"], KVCache]:
        *arrays, plan = args
        return attend_packed(
            *arrays,
            layout=spec.layout,
            chip=spec.chip,
            scale=spec.info.head_dim**-0.5,
            implementation=spec.attention,
            plan=plan,
        )

    if spec.mesh.size == 1:
        return attention
    heads, whole = PartitionSpec(None, "model"), PartitionSpec()
    kv_cache = kv_cache_spec(spec.layout)
    return jax.shard_map(
        attention,
        mesh=spec.mesh,
        in_specs=(heads, whole, kv_cache, *[whole] * 6),
        out_specs=(heads, kv_cache),
        check_vma=False,  # kernels do not say how their results vary over the mesh
    )


def _matmul(spec: StepSpec, num_tokens: Int32[Array, ""]) -> Matmul:
    """Products of whose rows so many are live, the first ones."""
    return functools.partial(
        matmul,
        num_tokens=num_tokens,
        chip=spec.chip,
        num_devices=spec.mesh.size,
        implementation=spec.matmul,
    )


def _linears(spec: StepSpec, matmul: Matmul) -> tuple[Linear, Linear]:
    """`linear`, and that of inputs that devices have parts of. They add up results of the inputs'
    type, which halves what bfloat16 moves between devices."""
    plain = functools.partial(linear, matmul=matmul)
    if spec.mesh.size == 1:
        return plain, plain
    part, whole = PartitionSpec(None, "model"), PartitionSpec()

    def summed(
        x: Float[Array, "T *I"],
        weights: Float[Array, "L O I"] | Int8Weights,
        layer: Int32[Array, ""],
        fused: Fused = NOTHING_FUSED,
    ) -> Float[Array, "T O"]:
        assert fused.norm is None, "no device has all of x"
        before = fused._replace(residual=None)
        of_weights = PartitionSpec(None, None, "model")
        if isinstance(weights, Int8Weights):
            of_weights = Int8Weights(of_weights, whole)
        on_mesh = jax.shard_map(
            lambda x, weights, layer: jax.lax.psum(linear(x, weights, layer, before), "model"),
            mesh=spec.mesh,
            in_specs=(part, of_weights, whole),
            out_specs=whole,
        )
        summed = on_mesh(x, weights, layer)
        return summed if fused.residual is None else fused.residual + summed

    return plain, summed


def sample_step(
    logits: Float32[Array, "R V"],
    sampling_rows: Int32[Array, " R"],
    table: Int32[Array, "lines C"],
    mesh: Mesh,
) -> tuple[Int32[Array, " R"], Int32[Array, "lines C"]]:
    """Samples from `forward`'s logits; returns tokens in batch row order, and the table.

    For steps of which no sampling row has options or a mask.
    """
    rows = keep_whole(mesh, read_rows(table, sampling_rows))
    sampled = keep_whole(mesh, sample(logits, rows, rows.num_computed, mesh))
    return sampled, set_last_tokens(table, sampling_rows, sampled)


def sample_step_with_options(
    spec: OptionSpec,
    logits: Float32[Array, "R V"],
    sampling_rows: Int32[Array, " R"],
    table: Int32[Array, "lines C"],
    state: OptionState,
    mask: Int32[Array, "R W"],
    mesh: Mesh,
) -> tuple[Int32[Array, " R"], Int32[Array, "lines C"], OptionState]:
    """As `sample_step`, for all options; returns their state too.

    mask: bits of the tokens that each row may sample, as in `messages.GrammarMask`; zeros for rows
    that may sample anything.
    """
    rows = keep_whole(mesh, read_rows(table, sampling_rows))
    option_rows = jnp.where(rows.has_options != 0, sampling_rows, table.shape[0])
    options = keep_whole(mesh, read_options(state.lines, option_rows, spec))

    def shape(logits: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
        return shape_logits(logits, options, state.counts, option_rows, spec)

    sampled = keep_whole(
        mesh, sample_with_options(logits, rows, rows.num_computed, options, mask, shape, mesh)
    )
    table = set_last_tokens(table, sampling_rows, sampled)
    return sampled, table, count_tokens(state, options, option_rows, sampled, spec)
