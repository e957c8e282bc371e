"""The benches: what they count, and that a message which goes missing ends them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


_SLOW_READERS = """
import itertools, sys
import bench_fanout as bench

side = sys.argv[1]

class Transport(bench.TRANSPORTS[side]):
    def open_reader(self, reader_idx):
        start_us = (1000, 3000, 2000)[reader_idx]
        bench.time.monotonic_ns = itertools.count(1000 * start_us, 2000).__next__
        return super().open_reader(reader_idx)

bench.TRANSPORTS[side] = Transport
bench.time.monotonic_ns = itertools.count(0, 1000).__next__
print(*bench.measure(side, bench.Case(124, 0.0, 3), 4))
"""


@pytest.mark.parametrize("side", ["ring", "ZMQ"])
def test_the_last_of_the_readers_counts(side):
    """Clocks that only go on when looked at: the writer's twice a message, and a reader's once. In
    a process of its own: the bench forks."""
    command = [sys.executable, "-c", _SLOW_READERS, side]
    done = subprocess.run(
        command, cwd=SCRIPTS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "3000.0 3000.0 1.0\n", done.stdout + done.stderr


def test_a_message_that_no_reader_has_ends_the_bench(load, monkeypatch):
    bench = load("bench_fanout")
    monkeypatch.setattr(bench, "LOST_S", 0.05)
    done_fd, done_write_fd = os.pipe()
    with pytest.raises(SystemExit, match="did not arrive"):
        bench._write_all(lambda message: None, bench.Case(124, 0.0, 2), 3, done_fd)
    os.close(done_fd)
    os.close(done_write_fd)


def test_ratios_are_of_the_same_round(load):
    bench = load("bench_fanout")
    ring = [bench.Measured(p50, 8.0, 1.0) for p50 in (1.0, 20.0, 300.0)]
    zmq = [bench.Measured(p50, 4.0, 1.0) for p50 in (4.0, 100.0, 40.0)]
    line = bench.row(bench.Case(512, 0.005, 8), ring, zmq)
    assert " ".join(line.split()) == "512 5 ms 8 20 8 1 40 4 1 0.25 2.00"


def test_only_tokens_count_that_came_while_all_rows_decoded(load):
    bench = load("bench_engine")
    stamps = [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    assert bench.rate_while_all(stamps) == 4 / 2.0


def test_sides_are_compared_with_those_of_their_turn(load):
    bench = load("bench_engine")
    of_turns = bench._ratios([9.0, 20.0, 33.0, 40.0, 60.0], [10.0, 20.0, 30.0, 50.0, 50.0])
    assert of_turns == "1.000 [0.900, 1.100]"


def test_requests_of_another_seed_share_no_prompt(load):
    bench = load("bench_engine")
    requests = [
        *bench.decoding_requests(32, seed=0, max_tokens=40),
        *bench.decoding_requests(32, seed=1, max_tokens=40),
    ]
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 64
    assert [request.request_id for request in requests[32:]] == [str(row) for row in range(32)]
    assert {request.sampling.max_tokens for request in requests} == {40}


def test_the_table_of_api_servers_compares_with_the_first_count(load, capsys):
    bench = load("bench_server")

    def sample(cpu_s, connections):
        by_kind = dict.fromkeys(bench.KINDS, 0.5) | {"API servers": cpu_s}
        return bench.Sample(1000, 500, 0.1, by_kind, 0.25, connections)

    bench.print_table({1: [sample(1.0, [8])] * 3, 4: [sample(2.0, [1, 3, 2, 2])] * 3})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [
        "1 10,000 1,000 1.00 2.00 1.00 0.50 0.50 0.25 8",
        "4 10,000 500 0.50 2.00 2.00 0.50 0.50 0.25 1 3 2 2",
    ]
