"""Compiled shapes: a step's token and row counts are padded up to one of few buckets."""

import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One compiled shape of the step.

    num_tokens (T): token slots.  num_rows (R): rows of the batch.
    num_writes (W): writes to the batch state that one step can carry.
    """

    num_tokens: int
    num_rows: int
    num_writes: int

    @property
    def delta_len(self) -> int:
        """Entries of the int32 buffer that one step uploads; see `batch_state.StepDelta`."""
        return self.num_tokens + 3 * self.num_rows + 2 + 2 * self.num_writes


def make_buckets(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    smallest: int = 16,
    *,
    tiny: int = 0,
) -> tuple[Bucket, ...]:
    """Powers of two from `smallest` up to what holds max_num_batched_tokens, in rising order.

    tiny: token slots of one more bucket before them, if it is smaller; 0: none.
    """
    buckets = [_bucket(tiny, max_num_seqs)] if 0 < tiny < smallest else []
    num_tokens = smallest
    while True:
        buckets.append(_bucket(num_tokens, max_num_seqs))
        if num_tokens >= max_num_batched_tokens:
            return tuple(buckets)
        num_tokens *= 2


def _bucket(num_tokens: int, max_num_seqs: int) -> Bucket:
    return Bucket(num_tokens, min(max_num_seqs, num_tokens), max(128, 2 * num_tokens))


def bucket_for(buckets: tuple[Bucket, ...], num_tokens: int, num_rows: int) -> Bucket:
    """The smallest bucket that holds `num_tokens` tokens and `num_rows` rows."""
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens and num_rows <= bucket.num_rows:
            return bucket
    raise AssertionError(f"{num_tokens} tokens in {num_rows} rows exceed {buckets[-1]}")
