"""The host's view of the batch: turns the engine core's plans into uploads. NumPy only."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jaxserve.messages import AdmittedRow, SchedulerOutput
from jaxserve.worker.batch_state import (
    NUM_FIELDS,
    admission_fields,
    num_columns,
    unpack_delta,
)
from jaxserve.worker.buckets import Bucket


class StepInput(NamedTuple):
    """One step, not yet padded to a bucket.

    rows: ascending; each computes its q_lens (at least 1) and samples where `samples`.
    num_computed: tokens of each row that were computed before.
    token_ids: the tokens of all rows one after the other, -1 where the device knows the token.
    addresses, values: writes to the batch state that must be done first.
    """

    rows: Int32[np.ndarray, " R"]
    q_lens: Int32[np.ndarray, " R"]
    samples: Bool[np.ndarray, " R"]
    token_ids: Int32[np.ndarray, " T"]
    addresses: Int32[np.ndarray, " W"]
    values: Int32[np.ndarray, " W"]
    num_computed: Int32[np.ndarray, " R"]

    def repeats(self, other: "StepInput") -> bool:
        """Whether the device is told the same as in `other`; it counts itself what is computed."""
        return self.rows is other.rows and not len(self.values) and not len(other.values)

    def fill(self, buffer: Int32[np.ndarray, " D"], bucket: Bucket, num_lines: int) -> None:
        """Writes the step into an upload buffer; a batch state of `num_lines` lines tells what is
        past its end."""
        delta = unpack_delta(buffer, bucket)
        num_tokens, num_rows, num_writes = len(self.token_ids), len(self.rows), len(self.values)
        delta.token_ids[:num_tokens] = self.token_ids
        delta.token_ids[num_tokens:] = 0
        delta.rows[:num_rows] = self.rows
        delta.rows[num_rows:] = num_lines
        delta.cu_q_lens[0] = 0
        delta.cu_q_lens[1 : num_rows + 1] = np.cumsum(self.q_lens)
        delta.cu_q_lens[num_rows + 1 :] = num_tokens
        delta.samples[:num_rows] = self.samples
        delta.samples[num_rows:] = 0
        delta.num_rows[0] = num_rows
        delta.addresses[:num_writes] = self.addresses
        delta.addresses[num_writes:] = np.iinfo(np.int32).max
        delta.values[:num_writes] = self.values
        delta.values[num_writes:] = 0


class BatchMirror:
    """Row by row: how many tokens there are, how many are computed, how many blocks.

    It follows from the plans alone, never from results, so that a step can be built while the one
    before still runs.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int):
        self._max_blocks_per_row = max_blocks_per_row
        self._num_columns = num_columns(max_blocks_per_row)
        self._is_live = np.zeros(max_num_seqs, bool)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        # Runs of tokens that the device has not seen, as (first position, tokens), by row.
        self._known_tokens: dict[int, list[tuple[int, np.ndarray]]] = {}
        # While all rows only decode: the first such step, and how many came, which no array shows.
        self._decoding: StepInput | None = None
        self._num_decoded = 0

    def apply(self, plan: SchedulerOutput) -> StepInput:
        """Takes in one plan; returns what the device must do for it."""
        is_usual = not (plan.num_tokens or plan.admitted or plan.released_rows)
        if is_usual and not plan.forced_tokens and not self._known_tokens:
            return self._decode_all(plan)
        self._end_decoding()
        for row in plan.released_rows:
            assert self._is_live[row], f"row {row} is released but not live in step {plan.step_id}"
            self._is_live[row] = False
            self._known_tokens.pop(row, None)
        writes = [self._admit(admitted) for admitted in plan.admitted]
        for row, token_ids in plan.forced_tokens:
            self._force(row, token_ids)
        writes.append(self._add_blocks(plan.new_blocks))

        counts = self._is_live.astype(np.int32)
        counts[plan.num_tokens[::2]] = plan.num_tokens[1::2]
        rows = np.flatnonzero(counts).astype(np.int32)
        q_lens = counts[rows]
        ends = self._num_computed[rows] + q_lens
        samples = ends == self._num_tokens[rows]
        assert self._is_live[rows].all() and (ends <= self._num_tokens[rows]).all(), (
            f"step {plan.step_id} computes tokens that no live row has"
        )
        token_ids = self._token_ids(rows, q_lens, ends)
        self._num_computed[rows] = ends
        self._num_tokens[rows] += samples
        addresses, values = np.concatenate(writes, axis=1)
        return StepInput(rows, q_lens, samples, token_ids, addresses, values, ends - q_lens)

    def _decode_all(self, plan: SchedulerOutput) -> StepInput:
        """As `apply`, where each live row computes the one token that it lacks: the common case,
        in which only what changes from step to step is computed."""
        step = self._decoding
        if step is None:
            rows = np.flatnonzero(self._is_live).astype(np.int32)
            starts = self._num_computed[rows]
            assert np.array_equal(starts + 1, self._num_tokens[rows]), (
                f"step {plan.step_id} computes tokens that no live row has"
            )
            ones, none = np.ones(len(rows), np.int32), np.zeros(0, np.int32)
            step = StepInput(rows, ones, ones.astype(bool), -ones, none, none, starts)
            self._decoding = step
        num_computed = step.num_computed + self._num_decoded
        self._num_decoded += 1
        if not plan.new_blocks:
            return step._replace(num_computed=num_computed)
        addresses, values = self._add_blocks(plan.new_blocks)
        return step._replace(addresses=addresses, values=values, num_computed=num_computed)

    def _end_decoding(self) -> None:
        if self._decoding is not None:
            self._num_computed[self._decoding.rows] += self._num_decoded
            self._num_tokens[self._decoding.rows] += self._num_decoded
        self._decoding, self._num_decoded = None, 0

    def _admit(self, admitted: AdmittedRow) -> Int32[np.ndarray, "2 W"]:
        """Takes in a row; returns the addresses and values of its line."""
        row = admitted.row
        assert not self._is_live[row], f"row {row} is admitted twice"
        self._is_live[row] = True
        self._num_tokens[row] = len(admitted.token_ids)
        self._num_computed[row] = admitted.num_computed_tokens
        self._num_blocks[row] = len(admitted.block_ids)
        self._known_tokens[row] = [(0, np.array(admitted.token_ids, np.int32))]
        fields = admission_fields(
            admitted.sampling, admitted.num_prompt_tokens, admitted.num_computed_tokens
        )
        num_blocks = len(admitted.block_ids)
        assert num_blocks <= self._max_blocks_per_row, f"row {row} gets {num_blocks} blocks"
        writes = np.empty((2, len(fields) + num_blocks), np.int32)
        line = row * self._num_columns
        writes[0, : len(fields)] = line + np.arange(len(fields))
        writes[0, len(fields) :] = line + NUM_FIELDS + np.arange(num_blocks)
        writes[1, : len(fields)] = fields
        writes[1, len(fields) :] = admitted.block_ids
        return writes

    def _force(self, row: int, token_ids: list[int]) -> None:
        """Appends tokens to a row; they follow the one that it samples in a step in flight."""
        assert self._is_live[row], f"row {row} is forced but not live"
        known = self._known_tokens.setdefault(row, [])
        known.append((int(self._num_tokens[row]), np.array(token_ids, np.int32)))
        self._num_tokens[row] += len(token_ids)

    def _add_blocks(self, new_blocks: list[int]) -> Int32[np.ndarray, "2 W"]:
        """Appends (row, block id) pairs to block tables; returns addresses and values."""
        writes = np.empty((2, len(new_blocks) // 2), np.int32)
        writes[1] = new_blocks[1::2]
        for i, row in enumerate(new_blocks[::2]):
            writes[0, i] = row * self._num_columns + NUM_FIELDS + self._num_blocks[row]
            self._num_blocks[row] += 1
            assert self._is_live[row], f"row {row} gets a block but is not live"
            assert self._num_blocks[row] <= self._max_blocks_per_row, f"row {row} has no place left"
        return writes

    def _token_ids(
        self,
        rows: Int32[np.ndarray, " R"],
        q_lens: Int32[np.ndarray, " R"],
        ends: Int32[np.ndarray, " R"],
    ) -> Int32[np.ndarray, " T"]:
        token_ids = np.full(int(q_lens.sum()), -1, np.int32)
        if not self._known_tokens:
            return token_ids
        starts = np.cumsum(q_lens) - q_lens
        for row in list(self._known_tokens):
            idx = int(np.searchsorted(rows, row))
            if idx == len(rows) or rows[idx] != row:
                continue  # sits this step out
            chunk = token_ids[starts[idx] : starts[idx] + q_lens[idx]]
            begin, end = int(ends[idx] - q_lens[idx]), int(ends[idx])
            for first, known in self._known_tokens[row]:
                start, stop = max(begin, first), min(end, first + len(known))
                if start < stop:
                    chunk[start - begin : stop - begin] = known[start - first : stop - first]
            runs = [run for run in self._known_tokens[row] if run[0] + len(run[1]) > end]
            if runs:
                self._known_tokens[row] = runs
            else:
                del self._known_tokens[row]
        return token_ids
