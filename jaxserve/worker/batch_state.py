"""The batch on the device: one int32 table with a line a row, changed by small step deltas.

A request keeps its row from admission to its end. Columns 0..NUM_FIELDS hold what the step needs to
know of the request, the rest its block table. Floats are stored as their bits. The host changes the
table only through (address, value) writes that ride on a step's delta; an address is
row * num_columns + column.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, UInt32

from jaxserve.messages import FLOAT_EPS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.worker.buckets import Bucket
from jaxserve.worker.row_options import has_options


class Field(enum.IntEnum):
    """Columns of the table.

    LAST_TOKEN: the newest token, input of the next step once all others are computed.
    NUM_COMPUTED: tokens whose KV is in the cache; the position of the next input token.
    MIN_LEN: stop token ids are barred while the row has fewer tokens than this.
    HAS_OPTIONS: 1 for a row with options in `row_options`.
    FIRST_STOP: the first of MAX_STOP_TOKEN_IDS stop token ids, -1 where unused.
    """

    LAST_TOKEN = 0
    NUM_COMPUTED = 1
    TEMPERATURE = 2
    TOP_K = 3
    TOP_P = 4
    MIN_P = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    MIN_LEN = 8
    HAS_OPTIONS = 9
    FIRST_STOP = 10


NUM_FIELDS = Field.FIRST_STOP + MAX_STOP_TOKEN_IDS


def num_columns(max_blocks_per_row: int) -> int:
    """Width of the table."""
    return NUM_FIELDS + max_blocks_per_row


def admission_fields(
    sampling: SamplingParams, num_prompt_tokens: int, num_computed_tokens: int
) -> Int32[np.ndarray, " fields"]:
    """The first columns of a row's line, as far as the step will look at them."""
    is_greedy = sampling.temperature < FLOAT_EPS
    floats = np.array(
        [0.0 if is_greedy else sampling.temperature, sampling.top_p, sampling.min_p], np.float32
    ).view(np.int32)
    seed = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32 & 0xFFFFFFFF], np.uint32)
    min_len = num_prompt_tokens + sampling.min_tokens if sampling.min_tokens else 0
    num_stops = MAX_STOP_TOKEN_IDS if min_len else 0  # never looked at without min_len
    fields = np.full(Field.FIRST_STOP + num_stops, -1, np.int32)
    fields[Field.LAST_TOKEN] = 0
    fields[Field.NUM_COMPUTED] = num_computed_tokens
    fields[Field.TEMPERATURE], fields[Field.TOP_P], fields[Field.MIN_P] = floats
    fields[Field.TOP_K] = sampling.top_k
    fields[[Field.SEED_LOW, Field.SEED_HIGH]] = seed.view(np.int32)
    fields[Field.MIN_LEN] = min_len
    fields[Field.HAS_OPTIONS] = has_options(sampling)
    if min_len:
        stops = sampling.stop_token_ids
        fields[Field.FIRST_STOP : Field.FIRST_STOP + len(stops)] = stops
    return fields


class StepDelta(NamedTuple):
    """A step's upload, unpacked from its one int32 buffer; the order here is the order there.

    token_ids: -1 where the input is the row's LAST_TOKEN.
    rows: table line of each batch row, ascending; padding: any line past the table's end.
    cu_q_lens: running sum of the rows' token counts; padding repeats the last value.
    samples: 1 where the row has all its tokens after this step, and so samples the next one.
    addresses, values: writes to the table, done first; padding: an address past its end.
    """

    token_ids: Int32[Array, " T"]
    rows: Int32[Array, " R"]
    cu_q_lens: Int32[Array, " R+1"]
    samples: Int32[Array, " R"]
    num_rows: Int32[Array, " 1"]
    addresses: Int32[Array, " W"]
    values: Int32[Array, " W"]


def unpack_delta(buffer: Int32[Array | np.ndarray, " D"], bucket: Bucket) -> StepDelta:
    """The views of a step's buffer; D is `bucket.delta_len`. Works on NumPy arrays too."""
    rows, writes = bucket.num_rows, bucket.num_writes
    parts = []
    start = 0
    for length in (bucket.num_tokens, rows, rows + 1, rows, 1, writes, writes):
        parts.append(buffer[start : start + length])
        start += length
    assert start == bucket.delta_len
    return StepDelta(*parts)


class RowFields(NamedTuple):
    """The lines of a step's rows, by column; padding rows are all zeros."""

    last_token: Int32[Array, " R"]
    num_computed: Int32[Array, " R"]
    temperature: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    seed: UInt32[Array, "R 2"]
    min_len: Int32[Array, " R"]
    has_options: Int32[Array, " R"]
    stop_token_ids: Int32[Array, "R stops"]
    block_tables: Int32[Array, "R B"]


def read_rows(table: Int32[Array, "lines C"], rows: Int32[Array, " R"]) -> RowFields:
    """Gathers and decodes the lines of `rows`; a line past the end is all zeros: greedy."""
    lines = table.at[rows].get(mode="fill", fill_value=0)

    def floats(field: Field) -> Float32[Array, " R"]:
        return jax.lax.bitcast_convert_type(lines[:, field], jnp.float32)

    seed = lines[:, Field.SEED_LOW : Field.SEED_HIGH + 1]
    return RowFields(
        last_token=lines[:, Field.LAST_TOKEN],
        num_computed=lines[:, Field.NUM_COMPUTED],
        temperature=floats(Field.TEMPERATURE),
        top_k=lines[:, Field.TOP_K],
        top_p=floats(Field.TOP_P),
        min_p=floats(Field.MIN_P),
        seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
        min_len=lines[:, Field.MIN_LEN],
        has_options=lines[:, Field.HAS_OPTIONS],
        stop_token_ids=lines[:, Field.FIRST_STOP : NUM_FIELDS],
        block_tables=lines[:, NUM_FIELDS:],
    )


def apply_writes(
    table: Int32[Array, "lines C"], addresses: Int32[Array, " W"], values: Int32[Array, " W"]
) -> Int32[Array, "lines C"]:
    """The table after (address, value) writes; donate it. Addresses past the end are dropped."""
    flat = table.reshape(-1).at[addresses].set(values, mode="drop")
    return flat.reshape(table.shape)


def advance(table: Int32[Array, "lines C"], delta: StepDelta) -> Int32[Array, "lines C"]:
    """The table when the step's tokens are computed."""
    q_lens = delta.cu_q_lens[1:] - delta.cu_q_lens[:-1]
    return table.at[delta.rows, Field.NUM_COMPUTED].add(q_lens, mode="drop")


def set_last_tokens(
    table: Int32[Array, "lines C"], rows: Int32[Array, " R"], tokens: Int32[Array, " R"]
) -> Int32[Array, "lines C"]:
    """The table with a newest token for each of `rows`; lines past the end are dropped."""
    return table.at[rows, Field.LAST_TOKEN].set(tokens, mode="drop")
