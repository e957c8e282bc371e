"""Several worker processes make one mesh: the same tokens as one, and a death is named."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from jaxserve import config as configs
from jaxserve.config import EngineConfig, resolve_for_model
from jaxserve.engine.executor import WORKER_CLASS
from jaxserve.engine.executor.workers import WorkersExecutor
from jaxserve.errors import EngineDeadError, UserError
from tests.worker import tiny
from tests.worker.checkpoints import write_checkpoint

NUM_TOKENS = 6


def config_of(directory: Path, workers_per_host: int) -> EngineConfig:
    """Of a mesh of two devices."""
    config = configs.replace(
        EngineConfig(),
        model="tiny",
        served_model_name="tiny",
        dtype="float32",
        block_size=tiny.BLOCK_SIZE,
        num_kv_blocks=tiny.NUM_BLOCKS,
        max_num_seqs=tiny.NUM_ROWS,
        max_num_batched_tokens=tiny.SMALL.num_tokens,
        mesh="1x2",
        workers_per_host=workers_per_host,
    )
    return resolve_for_model(config, replace(tiny.INFO, path=str(directory)))


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[WorkersExecutor]:
    """Two processes with a device each."""
    write_checkpoint(tmp_path)
    executor = WorkersExecutor(config_of(tmp_path, workers_per_host=2), WORKER_CLASS)
    executor.start()
    yield executor
    executor.shutdown()


def tokens(executor: WorkersExecutor) -> list[int]:
    """One greedy answer."""
    planner, sampled = tiny.Planner(), []
    planner.admit(0, tiny.prompt(5))
    for plan, _ in [planner.plan({0: 5}), *(planner.plan() for _ in range(NUM_TOKENS - 1))]:
        executor.execute(plan)
        sampled += executor.collect().sampled_token_ids
    return sampled


def test_two_processes_answer_as_one_and_the_death_of_one_is_named(executor, tmp_path):
    got = tokens(executor)
    alone = WorkersExecutor(config_of(tmp_path, workers_per_host=1), WORKER_CLASS)
    try:
        alone.start()
        assert got == tokens(alone)
    finally:
        alone.shutdown()
    os.kill(executor.worker_pids[1], signal.SIGKILL)
    assert executor._workers[1].wait(20.0)
    with pytest.raises(EngineDeadError, match="worker 1 was killed by signal 9"):
        executor.check()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mesh": "1x4", "workers_per_host": 3}, "--workers-per-host 3 cannot share the 4 devices"),
        ({"mesh": "1x2", "workers_per_host": 2, "executor": "in_process"}, "--executor in_process"),
        ({"mesh": "1x2", "coordinator": "h:8470"}, "for several hosts, and there is one"),
        ({"mesh": "1x2", "host_id": 1}, "for several hosts, and there is one"),
        ({"mesh": "2x1", "num_hosts": 2}, "one host, and there are 2 hosts"),
        ({"mesh": "1x2", "num_hosts": 2, "coordinator": "h:65534"}, "a port up to 65533"),
        ({"mesh": "1x2", "num_hosts": 2, "coordinator": "h:٨٤٧٠"}, "is not HOST:PORT"),
        ({"mesh": "1x2", "num_hosts": 2, "coordinator": "h:" + "8" * 5000}, "is not HOST:PORT"),
    ],
)
def test_shares_that_cannot_be_are_refused(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        resolve_for_model(configs.replace(EngineConfig(), **flags), tiny.INFO)
