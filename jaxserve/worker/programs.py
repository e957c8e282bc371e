"""Every compiled program: what it takes, what it donates, how it is made.

`params` and states may be arrays or their shapes.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.worker.batch_state import apply_writes, num_columns
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.step import DeviceState, StepSpec, forward, sample_step
from jaxserve.worker.warmup import temp_bytes

EXTRA_WRITES = 4096  # writes that one extra upload carries

type Job = Callable[[], jax.stages.Compiled]
type Key = tuple[str, Bucket | int]  # a field of `Programs`, and what its programs differ in


class Programs(NamedTuple):
    """The compiled programs.

    forwards: (params, state, buffer) -> (logits, sampling rows, state), one a bucket.
    samples: (logits, sampling rows, table) -> (tokens, table), one a number of rows.
    masked_samples: the same with a mask as last argument.
    writes: (table, addresses, values) -> table, for more writes than a step carries.
    """

    forwards: dict[Bucket, jax.stages.Compiled]
    samples: dict[int, jax.stages.Compiled]
    masked_samples: dict[int, jax.stages.Compiled]
    writes: jax.stages.Compiled


def state_shapes(
    spec: StepSpec, max_num_seqs: int, max_blocks_per_row: int, num_blocks: int
) -> DeviceState:
    """Shapes of the device state."""
    table = jax.ShapeDtypeStruct((max_num_seqs, num_columns(max_blocks_per_row)), jnp.int32)
    return DeviceState(table, spec.layout.shape(num_blocks))


def empty_state(shapes: DeviceState, device: jax.Device) -> DeviceState:
    """The state before the first request, on `device`."""

    def zeros(shape: jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros(shape.shape, shape.dtype, device=device)

    return jax.tree.map(zeros, shapes)


def mask_words(vocab_size: int) -> int:
    """Words of a row's bit mask."""
    return -(-vocab_size // 32)


def compile_forward(
    spec: StepSpec, bucket: Bucket, params: object, state: DeviceState
) -> jax.stages.Compiled:
    """`Programs.forwards`, for one bucket. Donates the state."""

    def jaxserve_forward(params, state, buffer):
        return forward(spec, bucket, params, state, buffer)

    return _compile(jaxserve_forward, (1,), params, state, _int32(bucket.delta_len))


def compile_sample(
    spec: StepSpec, num_rows: int, state: DeviceState, *, is_masked: bool
) -> jax.stages.Compiled:
    """`Programs.samples` or `masked_samples`, for one number of rows. Donates the table."""

    def jaxserve_sample(logits, sampling_rows, table, *mask):
        return sample_step(logits, sampling_rows, table, *mask)

    logits = jax.ShapeDtypeStruct((num_rows, spec.info.vocab_size), jnp.float32)
    args = [logits, _int32(num_rows), state.table]
    if is_masked:
        args.append(_int32(num_rows, mask_words(spec.info.vocab_size)))
    return _compile(jaxserve_sample, (2,), *args)


def compile_writes(state: DeviceState, num_writes: int) -> jax.stages.Compiled:
    """`Programs.writes`. Donates the table."""

    def jaxserve_writes(table, addresses, values):
        return apply_writes(table, addresses, values)

    return _compile(jaxserve_writes, (0,), state.table, _int32(num_writes), _int32(num_writes))


def small_jobs(spec: StepSpec, row_counts: Iterable[int], state: DeviceState) -> dict[Key, Job]:
    """Everything but the forwards: programs that do not depend on the size of the KV cache."""
    jobs: dict[Key, Job] = {}
    for num_rows in row_counts:
        for name, is_masked in (("samples", False), ("masked_samples", True)):
            jobs[name, num_rows] = functools.partial(
                compile_sample, spec, num_rows, state, is_masked=is_masked
            )
    jobs["writes", 0] = functools.partial(compile_writes, state, EXTRA_WRITES)
    return jobs


def join_programs(compiled: Mapping[Key, jax.stages.Compiled]) -> Programs:
    """The programs of all keys; forwards from the smallest bucket to the largest."""

    def field(name: str) -> dict:
        found = {key[1]: program for key, program in compiled.items() if key[0] == name}
        return dict(sorted(found.items()))

    return Programs(
        field("forwards"), field("samples"), field("masked_samples"), compiled["writes", 0]
    )


def step_bytes(
    spec: StepSpec, buckets: Iterable[Bucket], compiled: Mapping[Key, jax.stages.Compiled]
) -> int:
    """Device memory that steps need beside parameters and states: the largest program's
    temporaries, and the logits of two steps in flight."""
    num_rows = max(bucket.num_rows for bucket in buckets)
    logits_bytes = num_rows * spec.info.vocab_size * 4
    return max(map(temp_bytes, compiled.values())) + 2 * logits_bytes


def _compile(function: Callable, donate: tuple[int, ...], *args: object) -> jax.stages.Compiled:
    with jax.enable_x64(False):  # whatever the program around an LLM has chosen
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
