"""Executors: steps run in order on every worker; a failure is reported by its root cause."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxserve import processes
from jaxserve.engine.executor import Executor, make_executor
from jaxserve.engine.executor.workers import WorkersExecutor
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import AdmittedRow, GrammarMask, SamplingParams, SchedulerOutput
from tests.fakes import FAKE_VOCAB_SIZE, fake_config, fake_output

PROMPT = [1, 2, 3, 4, 5]
KINDS = ["in_process", "worker"]


@pytest.fixture
def start() -> Iterator[Callable[..., Executor]]:
    with contextlib.ExitStack() as stack:

        def start(kind: str, worker: str = "FakeWorker", **config: object) -> Executor:
            executor = make_executor(
                fake_config(executor=kind, **config), worker_class=f"tests.fakes:{worker}"
            )
            stack.callback(executor.shutdown)
            executor.start()
            return executor

        yield start


def first_step(prompt: list[int]) -> SchedulerOutput:
    """A request on row 0 that computes its whole prompt."""
    row = AdmittedRow(0, prompt, len(prompt), 0, [1, 2], SamplingParams(max_tokens=20))
    return SchedulerOutput(0, admitted=[row], num_tokens=[0, len(prompt)])


def run_steps(executor: Executor, num_steps: int) -> list[int]:
    """Tokens of that many steps, one planned ahead."""
    tokens = []
    executor.execute(first_step(PROMPT))
    for step_id in range(num_steps):
        executor.execute(SchedulerOutput(step_id + 1))
        output = executor.collect()
        assert output.step_id == step_id
        tokens += output.sampled_token_ids
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_steps_run_in_order(start: Callable[..., Executor], kind: str) -> None:
    assert run_steps(start(kind), 10) == fake_output(PROMPT, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_awaits_its_mask(start: Callable[..., Executor], kind: str) -> None:
    executor = start(kind)
    executor.execute(msgspec.structs.replace(first_step(PROMPT), awaits_mask=True))
    words = np.zeros(-(-FAKE_VOCAB_SIZE // 32), "<u4")
    words[7 // 32] = 1 << 7 % 32
    executor.sample(GrammarMask(0, [0], words.tobytes()))
    # What follows the token in flight, and then a step that awaits nothing.
    executor.execute(SchedulerOutput(1, num_tokens=[0, 3], forced_tokens=[(0, [8, 9])]))
    assert executor.collect().sampled_token_ids == [7]
    assert executor.collect().sampled_token_ids == fake_output([*PROMPT, 7, 8, 9], 1)


def test_a_plan_larger_than_the_ring(start: Callable[..., Executor]) -> None:
    executor = start("worker")
    prompt = [70_000] * 2_000_000
    row = AdmittedRow(
        0, prompt, len(prompt), len(prompt) - 1, [1] * 125_000, SamplingParams(max_tokens=1)
    )
    executor.execute(SchedulerOutput(0, admitted=[row]))
    assert executor.collect().sampled_token_ids == fake_output(prompt, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("BrokenExecuteWorker", "failed: RuntimeError: out of device memory"),
        ("BrokenCollectWorker", "failed: RuntimeError: device reset"),
    ],
)
def test_an_exception_of_the_worker_is_the_reason(
    start: Callable[..., Executor], kind: str, worker: str, reason: str
) -> None:
    executor = start(kind, worker)
    with pytest.raises(EngineDeadError, match=reason):
        run_steps(executor, 5)
    with pytest.raises(EngineDeadError, match=reason):
        executor.execute(SchedulerOutput(9))
    with pytest.raises(EngineDeadError, match=reason):
        executor.collect()
    with pytest.raises(EngineDeadError, match=reason):
        executor.check()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_operator_did_wrong_is_a_user_error(
    start: Callable[..., Executor], kind: str
) -> None:
    with pytest.raises(UserError) as error:
        start(kind, "UnservableWorker")
    assert error.value.problem == "--num-kv-blocks 512 does not fit."
    assert error.value.fix == "Use --num-kv-blocks 100."


def test_a_worker_that_cannot_load_says_why(start: Callable[..., Executor]) -> None:
    with pytest.raises(EngineDeadError, match="worker 0 failed: RuntimeError: no such device"):
        start("worker", "BrokenLoadWorker")


def test_a_killed_worker_is_named(start: Callable[..., Executor]) -> None:
    executor = start("worker", "HangingWorker")
    assert isinstance(executor, WorkersExecutor)
    run_steps(executor, 2)
    os.kill(executor.worker_pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"^worker 0 was killed by signal 9 \(SIGKILL\)$"):
        executor.collect()


def test_a_worker_killed_while_idle_shows_on_its_fd(start: Callable[..., Executor]) -> None:
    executor = start("worker")
    assert isinstance(executor, WorkersExecutor)
    executor.check()
    os.kill(executor.worker_pids[0], signal.SIGKILL)
    assert executor._workers[0].wait(20.0)
    assert executor.failure_fds() == [executor._workers[0].death_fd]
    with pytest.raises(EngineDeadError, match=r"worker 0 was killed by signal 9 \(SIGKILL\)"):
        executor.check()


def test_last_words_are_heard_when_nobody_waits_for_a_step(start: Callable[..., Executor]) -> None:
    executor = start("worker", "BrokenCollectWorker")
    assert isinstance(executor, WorkersExecutor)
    run_steps(executor, 2)
    assert executor._workers[0].wait(20.0)
    with pytest.raises(EngineDeadError, match="worker 0 failed: RuntimeError: device reset"):
        executor.check()


def test_a_step_that_takes_too_long_fails(start: Callable[..., Executor]) -> None:
    executor = start("worker", "HangingWorker", step_timeout_s=0.5)
    with pytest.raises(EngineDeadError, match=r"did not finish a step within 0.5 s"):
        run_steps(executor, 3)


def test_all_ranks_read_the_plan_and_rank_0_answers() -> None:
    executor = WorkersExecutor(fake_config(workers_per_host=3), "tests.fakes:FakeWorker")
    try:
        executor.start()
        assert run_steps(executor, 3) == fake_output(PROMPT, 3)
        for reader in executor._readers[1:]:
            with pytest.raises(TimeoutError):
                reader.read(0.1)
        os.kill(executor.worker_pids[2], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker 2 was killed by signal 9"):
            for _ in range(3):
                executor.collect()
    finally:
        executor.shutdown()


def test_shutdown_ends_the_worker_and_closes_everything() -> None:
    fds_before = set(os.listdir("/proc/self/fd"))
    executor = WorkersExecutor(fake_config(), "tests.fakes:FakeWorker")
    executor.start()
    worker = executor._workers[0]
    executor.shutdown()
    assert worker.exit_code == 0
    assert set(os.listdir("/proc/self/fd")) == fds_before


def test_a_child_ignores_what_the_terminal_sends_to_the_group() -> None:
    """From its first instruction on: the signals come while Python is still starting."""
    child = processes.spawn("tests.engine.sleeping_child", "sleeper", b"hello")
    for _ in range(3):
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
        assert not child.wait(0.1)
    processes.stop_all([child], timeout_s=20.0)
    assert child.exit_code == 0


def test_a_death_is_noticed_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child = processes.spawn("tests.engine.sleeping_child", "sleeper", b"hello")
    assert not child.wait(0.1)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(20.0)
    assert child.describe_exit() == "sleeper was killed by signal 9 (SIGKILL)"
    child.close()


def test_a_child_that_does_not_listen_is_killed() -> None:
    child = processes.spawn("tests.engine.sleeping_child", "sleeper", b"deaf")
    processes.stop_all([child], timeout_s=0.3)
    assert child.exit_code == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="the system shows none")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_workers_ask_for_huge_pages(
    start: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    """Unless an operator says otherwise."""
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    executor = start("worker")
    environment = Path(f"/proc/{executor._workers[0].pid}/environ").read_text()
    # glibc itself puts zeros between what it has read.
    assert f"GLIBC_TUNABLES={expected}:" in environment.replace("\0", ":")
