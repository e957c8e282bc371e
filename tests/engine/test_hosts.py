"""Two hosts: messages reach the workers of both, and whatever ends one ends both, by name."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from jaxserve.engine.executor import host_agent
from jaxserve.engine.executor.remote_hosts import RemoteHosts, agreed_digest
from jaxserve.engine.executor.workers import WorkersExecutor
from jaxserve.errors import EngineDeadError, UserError
from tests.engine.test_executor import PROMPT, run_steps
from tests.fakes import fake_config, fake_output

NAME = rf"host 1 \({socket.gethostname()}\)"
STEP_TIMEOUT_S = 3.0

type Start = Callable[..., tuple[WorkersExecutor, subprocess.Popen]]


def three_free_ports() -> int:
    """The first of three in a row."""
    while True:
        sockets = [socket.socket() for _ in range(3)]
        try:
            sockets[0].bind(("127.0.0.1", 0))
            port = sockets[0].getsockname()[1]
            for offset in (1, 2):
                sockets[offset].bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return port


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts both hosts; returns host 0's executor, not yet started, and host 1's process."""
    started: list[tuple[WorkersExecutor, subprocess.Popen]] = []

    def run(worker: str = "FakeWorker", block_size: int = 16):
        port = three_free_ports()
        arguments = [worker, str(port), str(STEP_TIMEOUT_S), str(block_size)]
        host = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.host_process", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        config = fake_config(
            num_hosts=2, coordinator=f"127.0.0.1:{port}", step_timeout_s=STEP_TIMEOUT_S
        )
        executor = WorkersExecutor(config, "tests.fakes:FakeWorker", RemoteHosts(config))
        started.append((executor, host))
        return executor, host

    yield run
    for executor, host in started:
        if executor._hosts is not None and not executor._hosts._is_closed:
            executor.shutdown()
        host.kill()
        host.communicate()


def wait_dead(executor: WorkersExecutor, timeout_s: float = 15.0) -> EngineDeadError:
    """The failure that stops the executor."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            executor.check()
        except EngineDeadError as error:
            return error
        time.sleep(0.05)
    pytest.fail("nothing failed")


def worker_of(host: subprocess.Popen) -> int:
    (worker,) = psutil.Process(host.pid).children()
    return worker.pid


def test_both_run_the_steps_and_end_together(start: Start):
    executor, host = start()
    executor.start()
    assert run_steps(executor, 5) == fake_output(PROMPT, 5)
    time.sleep(2.5)  # idle, and alive
    executor.check()
    hosts = executor._hosts
    assert hosts is not None and hosts._passed == {1: hosts._num_sent}
    executor.shutdown()
    assert host.wait(10) == 0


def test_the_death_of_a_worker_far_away_is_named(start: Start):
    executor, host = start()
    executor.start()
    os.kill(worker_of(host), signal.SIGKILL)
    error = wait_dead(executor)
    assert str(error).startswith(
        f"host 1 ({socket.gethostname()}): worker 1 was killed by signal 9"
    )
    assert host.wait(10) == 1


def test_its_last_words_and_its_log_are_told(start: Start):
    executor, _ = start("BrokenExecuteWorker")
    executor.start()
    with pytest.raises(EngineDeadError, match=f"{NAME}: worker 1 failed: ") as caught:
        run_steps(executor, 2)
        raise wait_dead(executor)
    assert "its log ended with\n" in str(caught.value)
    assert "the worker failed" in str(caught.value)


def test_a_silent_host_is_given_up(start: Start):
    executor, host = start()
    executor.start()
    os.kill(host.pid, signal.SIGSTOP)
    try:
        time.sleep(1.0)
        executor.check()  # it may come back
        error = wait_dead(executor)
    finally:
        os.kill(host.pid, signal.SIGCONT)
    assert re.match(f"{NAME} has said nothing for [34] s", str(error))


def test_a_host_ends_when_host_0_is_gone(start: Start):
    executor, host = start()
    executor.start()
    hosts = executor._hosts
    assert hosts is not None
    hosts._plans.close(linger=0)  # as the kernel would for a dead process
    assert host.wait(15) == 1
    assert host.stderr is not None and "host 0 is gone" in host.stderr.read()
    hosts._plans = hosts._context.socket(1)


def test_a_host_that_is_stopped_says_so(start: Start):
    executor, host = start()
    executor.start()
    started_s = time.monotonic()
    host.terminate()
    error = wait_dead(executor)
    assert time.monotonic() - started_s < STEP_TIMEOUT_S
    assert re.match(f"{NAME}: it was stopped by a signal", str(error))
    assert host.wait(10) == 0


def test_what_ends_host_0_ends_the_others_with_a_failure(start: Start):
    executor, host = start()
    executor.start()
    assert executor._hosts is not None
    executor._hosts._fail(UserError("a problem", fix="a fix"))
    executor.shutdown()
    assert host.wait(10) == 1


def test_other_steps_than_host_0s_are_found_out(start: Start):
    executor, _ = start()
    executor.start()
    run_steps(executor, 2)
    assert executor._hosts is not None
    executor._hosts._digests[executor._hosts._num_sent] ^= 1
    assert "has run other steps than host 0: after message 3" in str(wait_dead(executor))


def test_other_flags_than_host_0s_are_refused(start: Start):
    executor, _ = start(block_size=32)
    with pytest.raises(UserError, match=f"{NAME} was started with other settings"):
        executor.start()


def test_a_host_that_is_refused_ends_whatever_its_workers_do(start: Start):
    executor, host = start("StuckLoadWorker", block_size=32)
    with pytest.raises(UserError, match=f"{NAME} was started with other settings"):
        executor.start()
    executor.shutdown()
    assert host.wait(15) == 1


def test_a_host_whose_workers_start_sees_that_host_0_is_gone(start: Start):
    executor, host = start("StuckLoadWorker")
    hosts = executor._hosts
    assert hosts is not None
    deadline_s = time.monotonic() + 15
    while not hosts._plans.poll(100):  # until it has subscribed
        assert time.monotonic() < deadline_s
    hosts._plans.close(linger=0)  # as the kernel would for a dead process
    hosts._plans = hosts._context.socket(1)
    assert host.wait(15) == 1
    assert host.stderr is not None and "host 0 is gone" in host.stderr.read()


def test_a_name_that_nobody_knows_is_said(caplog: pytest.LogCaptureFixture):
    host_agent._warn_if_unknown("[::1]:8470")
    host_agent._warn_if_unknown("127.0.0.1:8470")
    assert not caplog.records
    host_agent._warn_if_unknown("no-such-host.invalid:8470")
    assert "no-such-host.invalid is not known here yet" in caplog.text


def test_a_taken_port_is_named():
    port = three_free_ports()
    config = fake_config(num_hosts=2, coordinator=f"127.0.0.1:{port}")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port + 1))
        taken.listen()
        with pytest.raises(UserError, match=f"Port {port + 1}, which --coordinator"):
            RemoteHosts(config)


def test_what_may_differ_does_not_count():
    config = fake_config(num_hosts=2)
    assert agreed_digest(config) == agreed_digest(fake_config(num_hosts=2, host_id=1, port=1))
    assert agreed_digest(config) != agreed_digest(fake_config(num_hosts=2, max_num_seqs=7))
