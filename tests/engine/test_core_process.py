"""The processes: who notices whose death, and that nothing and nobody is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from jaxserve.errors import EngineDeadError, UserError
from jaxserve.grammars import grammar_from_regex
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDead,
    EngineOutput,
    FinishReason,
    UtilityCall,
    UtilityResult,
)
from tests.engine.client_process import ReceivingClient
from tests.fakes import fake_config, fake_output, fake_request
from tests.fakes_engine import byte_level_tokenizer

WAIT_S = 20.0
# A loaded machine may take its time; what is checked is that the end comes by itself.
ORPHAN_WAIT_S = 2.0
SHUTDOWN_WAIT_S = 5.0


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test: no file of ours in shared memory or the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shm_before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) == shm_before
    assert list(tmp_path.iterdir()) == []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_dead(*pids: int, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline_s, f"still alive: {alive}"
        time.sleep(0.01)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def started(worker: str = "FakeWorker", **config: object) -> AsyncIterator[ReceivingClient]:
    client = ReceivingClient(fake_config(**config), worker_class=f"tests.fakes:{worker}")
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test in an event loop whose callbacks may not fail either."""
    problems: list[dict] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )
        await asyncio.wait_for(test(), 3 * WAIT_S)

    asyncio.run(watched())
    assert problems == []


async def next_of[T: EngineOutput](client: ReceivingClient, kind: type[T]) -> T:
    while not isinstance(message := await client.recv(), kind):
        assert not isinstance(message, EngineDead), message
    return message


async def tokens_of(client: ReceivingClient, request_id: str, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        for output in (await next_of(client, EngineCoreOutputs)).outputs:
            if output.request_id == request_id:
                tokens += output.new_token_ids
    return tokens


def test_generate_abort_and_utility_calls(tmp_path: Path) -> None:
    async def test() -> None:
        async with started("SlowWorker") as client:
            # Even if everything is killed at once now, nothing stays behind.
            assert list(tmp_path.iterdir()) == []
            client.send(fake_request("a", [1, 2, 3], max_tokens=5))
            assert await tokens_of(client, "a", 5) == fake_output([1, 2, 3], 5)

            client.send(fake_request("b", [4], max_tokens=3000))
            client.send(fake_request("c", [5], max_tokens=3000))
            await tokens_of(client, "b", 2)
            client.send(AbortRequests(["b", "c"]))
            # The engine is idle long before 3,000 steps of 20 ms, and says so.
            while (await next_of(client, EngineCoreOutputs)).stats.num_running:
                pass

            client.send(UtilityCall(1, "reset_prefix_cache"))
            assert await next_of(client, UtilityResult) == UtilityResult(1, value=True)

    run(test)


def test_outputs_keep_to_grammars(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The engine core loads the checkpoint's tokenizer for the first of them."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    tokenizer = byte_level_tokenizer()
    tokenizer.backend.save(str(checkpoint / "tokenizer.json"))
    info = fake_config().model.info
    assert info is not None
    info = msgspec.structs.replace(info, path=str(checkpoint))
    grammar = grammar_from_regex("[a-c]{20}")

    async def test() -> None:
        async with started(info=info) as client:
            client.send(fake_request("a", [1], max_tokens=20, grammar=grammar))
            tokens = await tokens_of(client, "a", 20)
            assert set(bytes(tokens)) <= set(b"abc")

            client.send(fake_request("b", [1], grammar="start: nothing"))
            outputs: list[EngineCoreOutput] = []
            while not outputs:
                outputs = (await next_of(client, EngineCoreOutputs)).outputs
            assert outputs == [EngineCoreOutput("b", [], FinishReason.ABORT)]

            # Perhaps before it is compiled, perhaps after.
            for i in range(20):
                other = grammar_from_regex(f"[a-c]{{{i},3000}}")
                client.send(fake_request(f"c{i}", [1], max_tokens=3000, grammar=other))
                client.send(AbortRequests([f"c{i}"]))
            client.send(fake_request("d", [1], max_tokens=3, grammar=grammar))
            assert len(await tokens_of(client, "d", 3)) == 3
            client.send(fake_request("e", [1], max_tokens=3000, grammar="start: /(x|y){3000}/"))

    run(test)


def test_what_comes_before_somebody_receives_is_not_lost() -> None:
    async def test() -> None:
        async with started() as client:
            client.send(fake_request("a", [1], max_tokens=10))
            client.send(UtilityCall(1, "ping"))
            client.send(UtilityCall(2, "ping"))
            await asyncio.sleep(0.3)
            tokens: list[int] = []
            call_ids: list[int] = []
            while len(tokens) < 10 or len(call_ids) < 2:
                message = await client.recv()
                if isinstance(message, EngineCoreOutputs):
                    tokens += [i for output in message.outputs for i in output.new_token_ids]
                elif isinstance(message, UtilityResult):
                    call_ids.append(message.call_id)
            assert tokens == fake_output([1], 10)
            assert call_ids == [1, 2]

    run(test)


def test_shutdown_is_quick_and_complete_with_requests_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The engine core does as it is asked; it need not be told twice.
    monkeypatch.setattr("jaxserve.engine.core_client._ASK_TIMEOUT_S", 2 * SHUTDOWN_WAIT_S)

    async def test() -> None:
        async with started("SlowWorker") as client:
            pids = [client.pids[0], *children_of(client.pids[0])]
            assert len(pids) == 2
            client.send(fake_request("a", [1], max_tokens=3000))
            await tokens_of(client, "a", 2)
            started_s = time.monotonic()
            await client.shutdown()
            assert time.monotonic() - started_s < SHUTDOWN_WAIT_S
            wait_until_dead(*pids, within_s=0.0)
            while not isinstance(message := await client.recv(), EngineDead):
                pass
            assert message == EngineDead(reason="the engine was shut down")
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                client.send(AbortRequests(["a"]))

    run(test)


def test_shutdown_does_not_wait_for_a_step_that_hangs() -> None:
    async def test() -> None:
        async with started("HangingWorker") as client:
            pids = [client.pids[0], *children_of(client.pids[0])]
            client.send(fake_request("a", [1], max_tokens=10))
            await tokens_of(client, "a", 2)
            started_s = time.monotonic()
            await client.shutdown()
            assert time.monotonic() - started_s < SHUTDOWN_WAIT_S
            wait_until_dead(*pids, within_s=ORPHAN_WAIT_S)

    run(test)


def test_starting_may_be_cancelled() -> None:
    async def test() -> None:
        client = ReceivingClient(fake_config(), worker_class="tests.fakes:StuckLoadWorker")
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        while not children_of(client.pids[0]):
            await asyncio.sleep(0.01)
        pids = [client.pids[0], *children_of(client.pids[0])]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        wait_until_dead(*pids, within_s=ORPHAN_WAIT_S)

    run(test)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_killed_worker_fails_the_engine(is_busy: bool) -> None:
    async def test() -> None:
        async with started("SlowWorker") as client:
            (worker_pid,) = children_of(client.pids[0])
            if is_busy:
                client.send(fake_request("a", [1], max_tokens=3000))
                await tokens_of(client, "a", 2)
            os.kill(worker_pid, signal.SIGKILL)
            while not isinstance(message := await client.recv(), EngineDead):
                pass
            assert message.reason == "worker 0 was killed by signal 9 (SIGKILL)"
            assert client.connection.dead == message
            with pytest.raises(EngineDeadError, match="worker 0 was killed"):
                client.send(AbortRequests(["a"]))
            while client.exit_codes[0] is None:
                await asyncio.sleep(0.01)
            assert client.exit_codes[0] == 1

    run(test)


def test_a_killed_engine_core_is_noticed_and_leaves_no_worker() -> None:
    async def test() -> None:
        async with started() as client:
            (worker_pid,) = children_of(client.pids[0])
            receiving = asyncio.create_task(next_of(client, EngineDead))
            await asyncio.sleep(0.1)
            os.kill(client.pids[0], signal.SIGKILL)
            wait_until_dead(worker_pid, within_s=ORPHAN_WAIT_S)
            client.send(AbortRequests(["a"]))
            message = await asyncio.wait_for(receiving, WAIT_S)
            assert message.reason == "engine core was killed by signal 9 (SIGKILL)"

    run(test)


@pytest.mark.parametrize("worker", ["FakeWorker", "StuckLoadWorker"])
def test_an_idle_engine_costs_nothing_and_ends_with_its_client(worker: str) -> None:
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.client_process", f"tests.fakes:{worker}"],
        stdout=subprocess.PIPE,
    )
    with client:
        try:
            assert client.stdout is not None
            core_pid = int(client.stdout.readline())
            deadline_s = time.monotonic() + WAIT_S
            while not (workers := children_of(core_pid)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            pids = [client.pid, core_pid, *workers]
            if worker == "FakeWorker":
                # What its start left to do may still run in the first of these.
                assert min(most_cpu_s(pids, over_s=2.5) for _ in range(3)) < 0.025
        finally:
            client.kill()  # leaving the block waits for it
        wait_until_dead(*pids[1:], within_s=ORPHAN_WAIT_S)


def most_cpu_s(pids: list[int], *, over_s: float) -> float:
    """CPU seconds that the busiest of these processes uses."""
    before = [cpu_s(pid) for pid in pids]
    time.sleep(over_s)
    return max(cpu_s(pid) - before_s for pid, before_s in zip(pids, before, strict=True))


def test_what_the_operator_did_wrong_reaches_the_client() -> None:
    async def test() -> None:
        client = ReceivingClient(fake_config(), worker_class="tests.fakes:UnservableWorker")
        with pytest.raises(UserError) as error:
            await client.start()
        assert error.value.problem == "--num-kv-blocks 512 does not fit."
        assert error.value.fix == "Use --num-kv-blocks 100."
        assert client.exit_codes[0] == 2

    run(test)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("BrokenLoadWorker", "worker 0 failed: RuntimeError: no such device"),
        ("NoSuchWorker", "worker 0 failed: AttributeError: .*NoSuchWorker"),
    ],
)
def test_an_engine_that_cannot_start_says_why(worker: str, reason: str) -> None:
    async def test() -> None:
        with pytest.raises(EngineDeadError, match=reason):
            async with started(worker):
                pass

    run(test)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("BrokenExecuteWorker", "worker 0 failed: RuntimeError: out of device memory"),
        (
            "CompilingWorker",
            "1 compilations after warm-up, refused by --forbid-compile; step 2: a:1",
        ),
    ],
)
def test_a_failure_while_serving_is_the_last_message(worker: str, reason: str) -> None:
    async def test() -> None:
        async with started(worker, forbid_compile=True) as client:
            client.send(fake_request("a", [1], max_tokens=10))
            while not isinstance(message := await client.recv(), EngineDead):
                pass
            assert message == EngineDead(reason=reason)

    run(test)


def test_a_request_that_breaks_the_engine_core_is_reported() -> None:
    """It never should: the input processor refuses such requests."""

    async def test() -> None:
        async with started() as client:
            client.send(fake_request("a", []))
            while not isinstance(message := await client.recv(), EngineDead):
                pass
            assert message.reason.startswith("engine core failed: AssertionError")

    run(test)
