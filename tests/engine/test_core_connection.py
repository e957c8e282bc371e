"""What an API server receives: when, in which order, and what it hears at the end."""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop
import zmq

from jaxserve.config import encode_config
from jaxserve.engine.core_connection import CoreConnection
from jaxserve.engine.core_process import Outputs
from jaxserve.engine.framing import FrameWriter
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineDead,
    EngineInput,
    EngineOutput,
    EngineReady,
    MetricsReport,
    MetricsRequest,
    PeerMessage,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
    decode_engine_input,
    encode,
)
from tests.fakes import fake_config

WAIT_S = 10.0
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
DEAD = EngineDead(reason="worker 0 was killed")


def step(number: int) -> EngineCoreOutputs:
    return EngineCoreOutputs([], SchedulerStats(num_steps=number), 0.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    """More than what is under way needs."""
    await asyncio.sleep(0.05)


class Engine:
    """Engine cores that say what a test says, and API servers connected to them."""

    def __init__(self, directory: Path, *, num_engines: int = 1, num_api_servers: int = 1):
        self._zmq = zmq.Context()
        self.inputs = self._zmq.socket(zmq.PULL)
        self.inputs.bind(f"ipc://{directory}/input")
        peer_addresses = [f"ipc://{directory}/api-{idx}" for idx in range(num_api_servers)]
        self.writers: list[list[FrameWriter]] = []  # of each engine core, for each API server
        read_fds: list[list[int]] = [[] for _ in range(num_api_servers)]
        for _ in range(num_engines):
            pairs = [socket.socketpair() for _ in range(num_api_servers)]
            self.writers.append([FrameWriter(pair[0].detach()) for pair in pairs])
            for fds, pair in zip(read_fds, pairs, strict=True):
                fds.append(pair[1].detach())
        self.connections = [
            CoreConnection(idx, f"ipc://{directory}/input", peer_addresses, fds)
            for idx, fds in enumerate(read_fds)
        ]
        self.received: list[list[EngineOutput]] = [[] for _ in self.connections]

    @property
    def connection(self) -> CoreConnection:
        """Of the first API server."""
        return self.connections[0]

    def say(self, *messages: EngineOutput, engine_idx: int = 0, client_idx: int = 0) -> None:
        for message in messages:
            self.writers[engine_idx][client_idx].send(encode(message))

    def say_ready(self) -> None:
        for idx, writers in enumerate(self.writers):
            num_engines = len(self.writers)
            config = fake_config(data_parallel_size=num_engines, data_parallel_rank=idx)
            for client_idx in range(len(writers)):
                self.say(EngineReady(encode_config(config)), engine_idx=idx, client_idx=client_idx)

    async def heard(self) -> EngineInput:
        await until(lambda: self.inputs.poll(0))
        return decode_engine_input(self.inputs.recv())

    async def start(self) -> None:
        self.say_ready()
        waiting = [asyncio.create_task(self.connection.wait_ready())]
        for connection in self.connections[1:]:
            await connection.wait_ready()
            waiting.append(asyncio.create_task(connection.wait_to_serve()))
        assert await self.heard() == UtilityCall(0, "ping")
        for idx in range(len(self.writers)):
            assert not waiting[0].done()
            self.say(UtilityResult(0, True), engine_idx=idx)
        config = await waiting[0]
        assert config.parallel.data_parallel_rank == 0
        self.connection.tell_peers_to_serve()
        await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)

    def receive(self, client_idx: int = 0) -> list[EngineOutput]:
        """Begins to; what is received from now on."""
        received = self.received[client_idx]
        self.connections[client_idx].start_receiving(received.append)
        return received

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for writer in (writer for writers in self.writers for writer in writers):
            writer.close(0.0)
        self._zmq.destroy(linger=0)


def run(
    directory: Path,
    test: Callable[[Engine], Coroutine[None, None, None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    *,
    num_engines: int = 1,
    num_api_servers: int = 1,
) -> None:
    """Runs a test in an event loop whose callbacks may not fail either."""
    problems: list[dict] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        engine = Engine(directory, num_engines=num_engines, num_api_servers=num_api_servers)
        try:
            await asyncio.wait_for(test(engine), 3 * WAIT_S)
        finally:
            engine.close()

    asyncio.run(watched(), loop_factory=new_loop)
    assert problems == []


@pytest.mark.parametrize("new_loop", LOOPS)
def test_messages_come_in_order_and_in_no_task(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def test(engine: Engine) -> None:
        await engine.start()
        tasks: set[asyncio.Task | None] = set()
        received: list[EngineOutput] = []

        def handle(message: EngineOutput) -> None:
            tasks.add(asyncio.current_task())
            received.append(message)

        engine.connection.start_receiving(handle)
        sent: list[EngineOutput] = []
        for number in range(500):
            sent.append(step(number))
            engine.say(sent[-1])
            if number % 7 == 0:
                await asyncio.sleep(0)
        sent.append(UtilityResult(1, "x" * 3_000_000))
        engine.say(sent[-1])
        await until(lambda: len(received) == len(sent))
        assert received == sent
        assert tasks == {None}

    run(tmp_path, test, new_loop)


def test_nothing_is_lost_that_comes_before_somebody_receives(tmp_path: Path) -> None:
    async def test(engine: Engine) -> None:
        engine.say(step(1), engine_idx=1)
        await engine.start()
        engine.say(step(2), UtilityResult(3, 4), engine_idx=1)
        await settle()
        received = engine.receive()
        assert received == [step(1), step(2), UtilityResult(3, 4)]
        engine.say(step(3))
        await until(lambda: len(received) == 4)
        assert received[3] == step(3)

    run(tmp_path, test, num_engines=2)


@pytest.mark.parametrize("num_early", [0, 1, 2])
def test_a_death_is_the_last_message_and_stays(tmp_path: Path, num_early: int) -> None:
    """num_early: how much comes before somebody receives."""

    async def test(engine: Engine) -> None:
        await engine.start()
        steps: list[list[EngineOutput]] = [[step(1)], [DEAD, step(2), EngineDead("no")]]
        for messages in steps[:num_early]:
            engine.say(*messages)
        await settle()
        received = engine.receive()
        for messages in steps[num_early:]:
            engine.say(*messages)
        await until(lambda: len(received) == 2)
        engine.say(step(3), engine_idx=1)
        engine.connection.announce(EngineDead(reason="engine core exited with code 1"))
        await settle()
        assert received == [step(1), DEAD]
        assert engine.connection.dead == DEAD
        with pytest.raises(EngineDeadError, match=DEAD.reason):
            engine.connection.send(AbortRequests(["a"]))
        engine.close()
        assert received == [step(1), DEAD]

    run(tmp_path, test, num_engines=2)


@pytest.mark.parametrize(
    ("dead", "error"),
    [(DEAD, EngineDeadError), (EngineDead(reason="too big", fix="less"), UserError)],
)
@pytest.mark.parametrize("when", ["before", "while waiting", "not connected", "pinged"])
def test_a_death_ends_the_start(
    tmp_path: Path, dead: EngineDead, error: type[Exception], when: str
) -> None:
    async def test(engine: Engine) -> None:
        if when == "before":
            engine.say(dead)
        if when == "not connected":  # as when nobody is there yet
            engine.connection._input.disconnect(f"ipc://{tmp_path}/input")
        if when in ("not connected", "pinged"):
            engine.say_ready()
        waiting = asyncio.create_task(engine.connection.wait_ready())
        await settle()
        engine.say(dead)
        with pytest.raises(error, match=dead.reason):
            await asyncio.wait_for(waiting, WAIT_S)

    run(tmp_path, test)


def test_closing_tells_who_receives(tmp_path: Path) -> None:
    async def test(engine: Engine) -> None:
        await engine.start()
        received = engine.receive()
        engine.connection.close()
        engine.connection.close()
        assert received == [EngineDead(reason="the engine was shut down")]

    run(tmp_path, test)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_an_engine_core_that_is_gone_costs_nothing(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Nothing polls its socket until whoever watches the process tells of its death."""

    async def test(engine: Engine) -> None:
        await engine.start()
        received = engine.receive()
        engine.say(step(1))
        engine.writers[0][0].close(0.0)
        await until(lambda: received == [step(1)])
        began_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - began_s < 0.1
        engine.say(step(2), engine_idx=1)
        await until(lambda: received == [step(1), step(2)])
        engine.connection.announce(DEAD)
        assert received == [step(1), step(2), DEAD]

    run(tmp_path, test, new_loop, num_engines=2)


def test_what_cannot_be_decoded_fails_the_engine_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: Engine) -> None:
        await engine.start()
        received = engine.receive()
        engine.say(step(1))
        await until(lambda: received)
        for _ in range(3):
            engine.writers[0][0].send(b"no msgpack")
            await settle()
        assert received[0] == step(1)
        (dead,) = received[1:]
        assert isinstance(dead, EngineDead)
        assert dead.reason.startswith("the API server failed: ValidationError")

    run(tmp_path, test)
    assert caplog.text.count("cannot process what was received") == 1
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("new_loop", LOOPS)
def test_api_servers_talk_to_each_other(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def test(engine: Engine) -> None:
        await engine.start()
        first, second = engine.connections
        to_first: list[PeerMessage] = []
        to_second: list[PeerMessage] = []
        first.on_peer_message, second.on_peer_message = to_first.append, to_second.append
        first.send_to_peer(1, MetricsRequest(0, 7))
        await settle()
        assert to_second == []
        engine.receive(0)
        engine.receive(1)
        assert to_second == [MetricsRequest(0, 7)]  # it was early
        second.send_to_peer(0, MetricsReport(7, b"", 1))
        await until(lambda: to_first == [MetricsReport(7, b"", 1)])

        engine.say(step(1), client_idx=0)
        engine.say(step(2), client_idx=1)
        await until(lambda: engine.received == [[step(1)], [step(2)]])
        first.announce(DEAD)
        await until(lambda: engine.received == [[step(1), DEAD], [step(2), DEAD]])

    run(tmp_path, test, new_loop, num_api_servers=2)


def test_an_engine_core_sends_to_each_and_fails_with_none(tmp_path: Path) -> None:
    """`Outputs`: the coordinator comes last, through ZeroMQ; an API server may be gone."""
    context = zmq.Context()
    reports = context.socket(zmq.PULL)
    reports.set_hwm(0)
    reports.rcvtimeo = round(1000 * WAIT_S)
    reports.bind(f"ipc://{tmp_path}/stats")
    pairs = [socket.socketpair() for _ in range(3)]
    outputs = Outputs(context, [pair[0].detach() for pair in pairs], f"ipc://{tmp_path}/stats")
    sinks = [pair[1] for pair in pairs]
    sinks[1].close()
    sent: list[list[EngineOutput]] = [[] for _ in range(4)]
    for number in range(3_000):  # more than the kernel holds
        for client_idx, messages in enumerate(sent):
            messages.append(step(number * (client_idx + 1)))
            outputs.send(client_idx, messages[-1])
    outputs.send_to_all(DEAD)

    async def received(idx: int, fd: int) -> list[EngineOutput]:
        address = f"ipc://{tmp_path}/input"
        connection, messages = CoreConnection(idx, address, [], [fd]), list[EngineOutput]()
        connection.start_receiving(messages.append)
        await until(lambda: connection.dead)
        connection.close()
        return messages

    async def test() -> None:
        closing = asyncio.create_task(asyncio.to_thread(outputs.close))
        assert await received(0, sinks[0].detach()) == [*sent[0], DEAD]
        assert await received(2, sinks[2].detach()) == [*sent[2], DEAD]
        await closing

    asyncio.run(asyncio.wait_for(test(), 3 * WAIT_S))
    assert [reports.recv() for _ in range(3_001)] == [encode(m) for m in (*sent[3], DEAD)]
    context.destroy(linger=0)
