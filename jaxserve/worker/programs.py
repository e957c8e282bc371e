"""Every compiled program: what it takes, what it donates, how it is made.

`params` and states may be arrays or their shapes, with their shardings. What is uploaded is whole
on every device; see `sharding` for the rest.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxserve.errors import UserError
from jaxserve.messages import MAX_LOGPROB_TOKEN_IDS
from jaxserve.worker.batch_state import apply_writes, num_columns
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.program_store import Job
from jaxserve.worker.prompt_outputs import add_pooled, piece_len, score_prompt
from jaxserve.worker.row_options import OptionSpec, OptionState, write_options
from jaxserve.worker.sharding import by_vocab, device_bytes, kv_cache_shapes, place
from jaxserve.worker.step import (
    DeviceState,
    StepSpec,
    forward,
    sample_step,
    sample_step_with_options,
)
from jaxserve.worker.token_scores import score_tokens
from jaxserve.worker.warmup import result_bytes, temp_bytes

EXTRA_WRITES = 4096  # writes that one extra upload carries

type Key = tuple[str, Any]  # a field of `Programs`, and what its programs differ in


class Programs(NamedTuple):
    """The compiled programs.

    forwards: (params, state, buffer) -> (logits, sampling rows, state), one a bucket.
    samples: (logits, sampling rows, table) -> (tokens, table), one a number of rows.
    option_samples: (logits, sampling rows, table, options, mask) -> (tokens, table, options), for
        steps with a row that has options or a mask; one a number of rows.
    scores: (logits, tokens, chosen) -> `TokenScores`, one a (number of rows, size of the top).
    prompt_scores: (params, hidden, places, next tokens) -> `TokenScores`, one a size of the top.
    pool: (pooled, hidden, lines, is_fresh) -> pooled.
    writes: (table, addresses, values) -> table, for more writes than a step carries.
    option_writes: (options, row, encoded) -> options, when a row with options is admitted.
    """

    forwards: dict[Bucket, jax.stages.Compiled]
    samples: dict[int, jax.stages.Compiled]
    option_samples: dict[int, jax.stages.Compiled]
    scores: dict[tuple[int, int], jax.stages.Compiled]
    prompt_scores: dict[int, jax.stages.Compiled]
    pool: jax.stages.Compiled
    writes: jax.stages.Compiled
    option_writes: jax.stages.Compiled


class RunnerState(NamedTuple):
    """Everything on the device between steps but the parameters.

    no_masks: a mask that bars nothing, by number of rows.
    pooled: sums of hidden states, a line a table line.
    """

    step: DeviceState
    options: OptionState
    no_masks: dict[int, Any]  # Int32[Array, "R W"]
    pooled: Any  # Float32[Array, "lines D"]


def state_shapes(
    spec: StepSpec, max_num_seqs: int, max_blocks_per_row: int, num_blocks: int
) -> DeviceState:
    """Shapes of what forwards change."""
    whole = place(spec.mesh)
    hidden_shape = (spec.max_num_tokens, spec.info.hidden_size)
    hidden = jax.ShapeDtypeStruct(hidden_shape, spec.dtype, sharding=whole)
    table = _int32(whole, max_num_seqs, num_columns(max_blocks_per_row))
    return DeviceState(table, kv_cache_shapes(spec.layout, num_blocks, spec.mesh), hidden)


def runner_state_shapes(
    spec: StepSpec, options: OptionSpec, row_counts: Iterable[int], step: DeviceState
) -> RunnerState:
    """Shapes of the whole state, around those of `step`."""
    num_lines, whole = step.table.shape[0], place(spec.mesh)
    counts = _int32(by_vocab(spec.info.vocab_size, spec.mesh), num_lines, options.vocab_size)
    return RunnerState(
        step,
        OptionState(_int32(whole, num_lines, options.line_len), counts),
        {num_rows: _int32(whole, num_rows, options.mask_words) for num_rows in row_counts},
        _float32(whole, num_lines, spec.info.hidden_size),
    )


def state_bytes(state: RunnerState) -> int:
    """Memory of a device for the state beside the KV cache."""
    return device_bytes(state._replace(step=state.step._replace(kv_cache=None)))


def empty_state[State: tuple](shapes: State) -> State:
    """The state before the first request."""

    def zeros() -> State:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    with jax.enable_x64(False):
        return jax.jit(zeros, out_shardings=_shardings(shapes))()


def compile_forward(
    spec: StepSpec, bucket: Bucket, params: object, state: DeviceState
) -> jax.stages.Compiled:
    """`Programs.forwards`, for one bucket. Donates the state."""

    def jaxserve_forward(params, state, buffer):
        return forward(spec, bucket, params, state, buffer)

    whole = place(spec.mesh)
    results = (by_vocab(spec.info.vocab_size, spec.mesh), whole, _shardings(state))
    buffer = _int32(whole, bucket.delta_len)
    options = {}
    if _device(results).platform == "cpu":
        # With its library, sums are added up in another order in steps of a few tokens than in
        # others, and an answer depends on what runs beside it.
        options["xla_cpu_experimental_ynn_fusion_type"] = ""
    return _compile(jaxserve_forward, (1,), results, params, state, buffer, options=options)


def compile_sample(spec: StepSpec, num_rows: int, state: DeviceState) -> jax.stages.Compiled:
    """`Programs.samples`, for one number of rows. Donates the table."""

    def jaxserve_sample(logits, sampling_rows, table):
        return sample_step(logits, sampling_rows, table, spec.mesh)

    whole = place(spec.mesh)
    logits = _logits(spec, num_rows)
    return _compile(jaxserve_sample, (2,), whole, logits, _int32(whole, num_rows), state.table)


def compile_option_sample(
    spec: StepSpec, options: OptionSpec, num_rows: int, state: RunnerState
) -> jax.stages.Compiled:
    """`Programs.option_samples`, for one number of rows. Donates the table and the options."""

    def jaxserve_option_sample(logits, sampling_rows, table, state, mask):
        return sample_step_with_options(
            options, logits, sampling_rows, table, state, mask, spec.mesh
        )

    whole = place(spec.mesh)
    return _compile(
        jaxserve_option_sample,
        (2, 3),
        (whole, whole, _shardings(state.options)),
        _logits(spec, num_rows),
        _int32(whole, num_rows),
        state.step.table,
        state.options,
        _int32(whole, num_rows, options.mask_words),
    )


def compile_scores(spec: StepSpec, num_rows: int, num_top: int) -> jax.stages.Compiled:
    """`Programs.scores`. Donates nothing."""

    def jaxserve_scores(logits, tokens, chosen):
        return score_tokens(logits, tokens, chosen, num_top)

    whole = place(spec.mesh)
    chosen = _int32(whole, num_rows, MAX_LOGPROB_TOKEN_IDS)
    tokens = _int32(whole, num_rows)
    return _compile(jaxserve_scores, (), whole, _logits(spec, num_rows), tokens, chosen)


def compile_prompt_scores(
    spec: StepSpec, params: object, state: DeviceState, num_top: int
) -> jax.stages.Compiled:
    """`Programs.prompt_scores`. Donates nothing."""

    def jaxserve_prompt_scores(params, hidden, places, next_tokens):
        return score_prompt(spec.info, num_top, params, hidden, places, next_tokens)

    whole = place(spec.mesh)
    piece = _int32(whole, piece_len(spec.max_num_tokens))
    return _compile(jaxserve_prompt_scores, (), whole, params, state.hidden, piece, piece)


def compile_pool(state: RunnerState) -> jax.stages.Compiled:
    """`Programs.pool`. Donates nothing: sums are read back while the next step adds to them."""

    def jaxserve_pool(pooled, hidden, lines, is_fresh):
        return add_pooled(pooled, hidden, lines, is_fresh)

    hidden, whole = state.step.hidden, state.pooled.sharding
    lines, is_fresh = _int32(whole, hidden.shape[0]), _int32(whole, state.pooled.shape[0])
    return _compile(jaxserve_pool, (), whole, state.pooled, hidden, lines, is_fresh)


def compile_writes(state: DeviceState, num_writes: int) -> jax.stages.Compiled:
    """`Programs.writes`. Donates the table."""

    def jaxserve_writes(table, addresses, values):
        return apply_writes(table, addresses, values)

    whole = state.table.sharding
    writes = _int32(whole, num_writes)
    return _compile(jaxserve_writes, (0,), whole, state.table, writes, writes)


def compile_option_writes(state: RunnerState) -> jax.stages.Compiled:
    """`Programs.option_writes`. Donates the options."""

    def jaxserve_option_writes(options, row, encoded):
        return write_options(options, row, encoded)

    whole, results = state.step.table.sharding, _shardings(state.options)
    encoded = _int32(whole, sum(part.shape[1] for part in state.options))
    row = _int32(whole)
    return _compile(jaxserve_option_writes, (0,), results, state.options, row, encoded)


def forward_jobs(
    spec: StepSpec, buckets: Iterable[Bucket], params: object, state: DeviceState
) -> dict[Key, Job]:
    """The forwards of `buckets`."""
    return {
        ("forwards", bucket): functools.partial(compile_forward, spec, bucket, params, state)
        for bucket in buckets
    }


def small_jobs(
    spec: StepSpec,
    options: OptionSpec,
    tops: Iterable[int],
    params: object,
    state: RunnerState,
) -> dict[Key, Job]:
    """Everything but the forwards: programs that do not depend on the size of the KV cache.

    tops: sizes of `token_scores.top_sizes`.
    """
    job = functools.partial
    jobs: dict[Key, Job] = {}
    for rows in state.no_masks:
        jobs["option_samples", rows] = job(compile_option_sample, spec, options, rows, state)
        jobs["samples", rows] = job(compile_sample, spec, rows, state.step)
        for top in tops:
            jobs["scores", (rows, top)] = job(compile_scores, spec, rows, top)
    for top in tops:
        jobs["prompt_scores", top] = job(compile_prompt_scores, spec, params, state.step, top)
    jobs["pool", None] = job(compile_pool, state)
    jobs["writes", None] = job(compile_writes, state.step, EXTRA_WRITES)
    jobs["option_writes", None] = job(compile_option_writes, state)
    return jobs


def join_programs(compiled: Mapping[Key, jax.stages.Compiled]) -> Programs:
    """The programs of all keys, each field's from the smallest key to the largest."""

    def field(name: str) -> Any:
        found = {key: program for (field, key), program in compiled.items() if field == name}
        return found[None] if None in found else dict(sorted(found.items()))

    return Programs(*map(field, Programs._fields))


def step_bytes(compiled: Mapping[Key, jax.stages.Compiled]) -> int:
    """Device memory that steps need beside parameters and states: the largest program's
    temporaries, and what two steps in flight give."""
    results: dict[str, int] = {}
    for (field, _), program in compiled.items():
        results[field] = max(results.get(field, 0), result_bytes(program))
    return max(map(temp_bytes, compiled.values())) + 2 * sum(results.values())


def _compile(
    function: Callable,
    donate: tuple[int, ...],
    results: object,
    *args: object,
    options: Mapping[str, bool | str] | None = None,
) -> jax.stages.Compiled:
    """results: the shardings of what `function` returns.  options: more of the compiler's.

    Raises:
      UserError: the compiler finds that the program does not fit a device's memory.
    """
    with jax.enable_x64(False):  # whatever the program around an LLM has chosen
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=results)
        lowered = jitted.lower(*args)
        try:
            return lowered.compile(
                compiler_options=_compiler_options(results) | dict(options or {})
            )
        except jax.errors.JaxRuntimeError as error:
            reason = str(error)
            if "RESOURCE_EXHAUSTED" not in reason:
                raise
            raise UserError(
                f"{function.__name__} does not fit a device's memory: {reason.split(chr(10))[0]}",
                fix="Use a wider --mesh, or a smaller --max-num-batched-tokens, --max-num-seqs or "
                "--memory-utilization.",
            ) from error


def _device(shardings: object) -> jax.Device:
    return next(iter(jax.tree.leaves(shardings)[0].device_set))


def _compiler_options(shardings: object) -> dict[str, bool | str]:
    """What the compiler for the devices of `shardings` must be told."""
    device = _device(shardings)
    if "tpu7x" in device.device_kind.lower():
        # It would copy all weights in every step, into tiles of 16 rows.
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
    if device.platform in ("gpu", "cuda", "rocm"):
        # Its own matmuls take copies of a layer's weights out of the stack of all layers, three
        # times what must be read; cuBLAS's read them where they lie.
        return {"xla_gpu_enable_triton_gemm": False}
    return {}


def _shardings(tree: object) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _logits(spec: StepSpec, num_rows: int) -> jax.ShapeDtypeStruct:
    return _float32(by_vocab(spec.info.vocab_size, spec.mesh), num_rows, spec.info.vocab_size)


def _int32(sharding: Sharding, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


def _float32(sharding: Sharding, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
