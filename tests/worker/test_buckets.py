"""Buckets: rising, covering every step within the limits, and no larger than needed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.worker.batch_state import unpack_delta
from jaxserve.worker.buckets import Bucket, bucket_for, make_buckets

# As `sizing` guarantees: at least as many tokens as rows.
limits = st.tuples(st.integers(1, 3000), st.integers(1, 600), st.sampled_from([1, 8, 16])).map(
    lambda x: (max(x[:2]), x[1], x[2])
)


@given(limits)
def test_buckets_rise_by_doubling_up_to_the_limit(limit):
    max_tokens, max_rows, smallest = limit
    buckets = make_buckets(max_tokens, max_rows, smallest)
    assert buckets[0].num_tokens == smallest
    for before, after in itertools.pairwise(buckets):
        assert after.num_tokens == 2 * before.num_tokens
        assert after.num_rows >= before.num_rows and after.num_writes >= before.num_writes
        assert before.num_tokens < max_tokens  # or `after` would be of no use
    assert buckets[-1].num_tokens >= max_tokens
    assert buckets[-1].num_rows == max_rows
    for bucket in buckets:
        assert bucket.num_rows == min(max_rows, bucket.num_tokens)


@given(limits, st.data())
def test_every_step_within_the_limits_has_the_smallest_bucket_that_holds_it(limit, data):
    max_tokens, max_rows, smallest = limit
    buckets = make_buckets(max_tokens, max_rows, smallest)
    num_rows = data.draw(st.integers(0, max_rows))
    num_tokens = data.draw(st.integers(num_rows, max_tokens))
    chosen = bucket_for(buckets, num_tokens, num_rows)
    fitting = [b for b in buckets if b.num_tokens >= num_tokens and b.num_rows >= num_rows]
    assert chosen == min(fitting, key=lambda bucket: bucket.num_tokens)


@given(limits)
def test_delta_len_is_what_the_delta_needs(limit):
    for bucket in make_buckets(*limit):
        delta = unpack_delta(np.zeros(bucket.delta_len, np.int32), bucket)
        assert sum(map(len, delta)) == bucket.delta_len
        assert len(delta.token_ids) == bucket.num_tokens
        assert len(delta.cu_q_lens) == bucket.num_rows + 1


def test_a_table_of_buckets():
    assert make_buckets(100, 24) == (
        Bucket(16, 16, 128),
        Bucket(32, 24, 128),
        Bucket(64, 24, 128),
        Bucket(128, 24, 256),
    )
    assert [b.num_tokens for b in make_buckets(64, 4, smallest=8)] == [8, 16, 32, 64]
    assert [b.num_tokens for b in make_buckets(8, 4, smallest=16)] == [16]
    with_tiny = make_buckets(64, 4, smallest=8, tiny=2)
    assert with_tiny == (Bucket(2, 2, 128), *make_buckets(64, 4, smallest=8))
    assert make_buckets(64, 1, smallest=8, tiny=2)[0] == Bucket(2, 1, 128)
    assert make_buckets(4, 4, smallest=2, tiny=2) == make_buckets(4, 4, smallest=2)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(129, 1), (30, 25)])
def test_a_step_beyond_the_limits_is_refused(num_tokens, num_rows):
    with pytest.raises(AssertionError, match=f"{num_tokens} tokens in {num_rows} rows exceed"):
        bucket_for(make_buckets(100, 24), num_tokens, num_rows)
