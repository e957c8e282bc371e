"""Which engine core gets a request: fair, and true to what prefix caches hold."""

import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.placement import Placement
from jaxserve.messages import SchedulerStats


def placement_of(*num_kv_blocks: int) -> Placement:
    placement = Placement(len(num_kv_blocks))
    for idx, num_blocks in enumerate(num_kv_blocks):
        placement.set_num_kv_blocks(idx, num_blocks)
    return placement


def blocks(name: str, count: int) -> list[bytes]:
    """Hashes of a prompt's blocks; prompts of one name share their beginning."""
    return [f"{name}{i}".encode() for i in range(count)]


def test_requests_without_a_common_beginning_take_turns():
    placement = placement_of(100, 100, 100)
    chosen = [placement.choose(blocks(f"p{i}-", 2)) for i in range(9)]
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3}


def test_a_known_beginning_goes_where_it_is_known():
    placement = placement_of(100, 100)
    first = placement.choose(blocks("a", 3))
    other = placement.choose(blocks("b", 3))
    assert other != first
    assert placement.choose(blocks("a", 5)) == first
    assert placement.choose(blocks("b", 1)) == other


def test_the_longer_beginning_counts_more():
    placement = placement_of(100, 100)
    long = placement.choose(blocks("a", 8))
    short = placement.choose([b"other", *blocks("b", 1)])
    assert long != short
    placement.choose(blocks("a", 2))
    assert placement.choose(blocks("a", 8)) == long


def test_a_block_counts_only_behind_those_before_it():
    placement = placement_of(100, 100)
    first = placement.choose(blocks("a", 3))
    second = placement.choose(blocks("x", 1))
    assert second != first
    # The same later blocks, but another first one: of no use to the first engine core's cache.
    placement.observe(first, SchedulerStats(num_running=1, num_requests=1))
    placement.observe(second, SchedulerStats(num_requests=1))
    assert placement.choose([b"new", *blocks("a", 3)[1:]]) == second


def test_a_busy_engine_core_gets_no_more_of_what_it_knows():
    placement = placement_of(100, 100)
    first = placement.choose(blocks("a", 3))
    placement.observe(first, SchedulerStats(num_running=4, num_requests=1))
    assert placement.choose(blocks("a", 3)) == first
    placement.observe(first, SchedulerStats(num_running=5, num_requests=2))
    assert placement.choose(blocks("a", 3)) == 1 - first


def test_what_is_under_way_counts():
    """A burst comes before any report."""
    placement = placement_of(100, 100)
    assert Counter(placement.choose([]) for _ in range(100)) == {0: 50, 1: 50}
    placement.observe(0, SchedulerStats(num_requests=50))  # all of these have ended
    assert [placement.choose([]) for _ in range(50)] == [0] * 50


def test_what_waits_counts_as_what_runs():
    placement = placement_of(100, 100)
    placement.observe(0, SchedulerStats(num_waiting=3))
    placement.observe(1, SchedulerStats(num_running=2))
    assert placement.choose([]) == 1


def test_what_the_cache_must_have_lost_is_forgotten():
    placement = placement_of(4, 4)
    first = placement.choose(blocks("a", 2))
    placement.choose(blocks("b", 2))
    for _ in range(2):  # each gets four other blocks
        placement.choose(blocks(f"c{_}-", 4))
    placement.observe(first, SchedulerStats(num_running=2, num_requests=2))
    placement.observe(1 - first, SchedulerStats(num_requests=2))
    assert placement.choose(blocks("a", 2)) == 1 - first


def test_a_used_beginning_is_lost_last():
    placement = placement_of(5)
    placement.choose(blocks("a", 2))
    placement.choose(blocks("b", 2))
    placement.choose(blocks("a", 2))
    placement.choose(blocks("c", 3))
    (engine,) = placement._engines
    assert engine.num_known(blocks("a", 2)) == 2
    assert engine.num_known(blocks("b", 2)) == 0


def test_emptied_caches_are_forgotten():
    placement = placement_of(100, 100)
    first = placement.choose(blocks("a", 3))
    placement.forget_prefixes()
    placement.observe(first, SchedulerStats(num_running=1, num_requests=1))
    assert placement.choose(blocks("a", 3)) == 1 - first


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=60), st.integers(1, 4))
def test_no_engine_core_gets_far_more_than_the_idlest(requests, num_engines):
    """Nothing ends: loads may differ by the slack and the one request that used it up."""
    placement = placement_of(*[50] * num_engines)
    counts = [0] * num_engines
    for name, length in requests:
        counts[placement.choose(blocks(f"p{name}-", length))] += 1
    mean = sum(counts) / num_engines
    assert max(counts) - min(counts) <= max(4, 0.2 * mean) + 1


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_load_is_shared_and_finds_its_beginnings(seed):
    """Thirty conversations of many turns, 32 requests at once, each of another length: loads within
    a fifth of each other, and nine turns of ten where the turn before was."""
    rng = random.Random(seed)
    placement = placement_of(1000, 1000)
    running: deque[tuple[int, int]] = deque()  # (ends at, engine core)
    loads, counts = [0, 0], [0, 0]
    home: dict[int, int] = {}
    turns, at_home = 0, 0
    for now in range(600):
        while len(running) >= 32 or (running and min(running)[0] <= now):
            done = min(running)
            running.remove(done)
            loads[done[1]] -= 1
            placement.observe(
                done[1], SchedulerStats(num_running=loads[done[1]], num_requests=counts[done[1]])
            )
        conversation = rng.randrange(30)
        chosen = placement.choose(blocks(f"{conversation}-", 2 + now // 60))
        turns += conversation in home
        at_home += home.get(conversation) == chosen
        home[conversation] = chosen
        counts[chosen] += 1
        loads[chosen] += 1
        running.append((now + rng.randrange(10, 60), chosen))
    assert at_home / turns >= 0.9, (at_home, turns)
    assert abs(counts[0] - counts[1]) <= 0.2 * max(counts), counts
