"""The coordinator between sockets: what it hands to whom, and not before it hears of every step."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from jaxserve.config import encode_config
from jaxserve.engine.coordinator_process import Coordinator
from jaxserve.messages import (
    AbortRequests,
    CoordinatorStart,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInput,
    EngineReady,
    SchedulerStats,
    Shutdown,
    UtilityCall,
    decode_engine_input,
    encode,
)
from tests.fakes import fake_config, fake_request

TIMEOUT_MS = 10_000
NUM_ENGINES = 2


class Sockets:
    """The API server's side and the engine cores' side of a running coordinator."""

    def __init__(self, directory: Path, **config: object):
        self.config = fake_config(data_parallel_size=NUM_ENGINES, **config)
        addresses = [f"ipc://{directory}/input-{i}" for i in range(NUM_ENGINES)]
        start = CoordinatorStart(
            config=encode_config(self.config),
            input_address=f"ipc://{directory}/input",
            stats_address=f"ipc://{directory}/stats",
            engine_addresses=addresses,
        )
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.connect(start.input_address)
        self._stats = self._context.socket(zmq.PUSH)
        self._stats.connect(start.stats_address)
        self._engines = [self._context.socket(zmq.PULL) for _ in addresses]
        for engine, address in zip(self._engines, addresses, strict=True):
            engine.bind(address)
        self._coordinator = Coordinator(start)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self._coordinator.run()
        self._coordinator.close()

    def send(self, message: EngineInput) -> None:
        self._input.send(encode(message))

    def ready(self, engine_idx: int) -> None:
        config = fake_config(data_parallel_size=NUM_ENGINES, data_parallel_rank=engine_idx)
        self._stats.send(encode(EngineReady(encode_config(config))))

    def report(self, engine_idx: int, **stats: int) -> None:
        outputs = EngineCoreOutputs([], SchedulerStats(**stats), 0.0, engine_idx)
        self._stats.send(encode(outputs))

    def received(self, engine_idx: int) -> EngineInput:
        assert self._engines[engine_idx].poll(TIMEOUT_MS), "nothing came"
        return decode_engine_input(self._engines[engine_idx].recv())

    def nothing_comes(self) -> bool:
        return not any(engine.poll(200) for engine in self._engines)

    def close(self) -> None:
        for idx in range(NUM_ENGINES):  # whatever the test has not said
            self.ready(idx)
        self.send(Shutdown())
        self.thread.join(TIMEOUT_MS / 1000)
        assert not self.thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    running = Sockets(tmp_path)
    yield running
    running.close()


def test_nothing_is_passed_on_before_every_engine_core_reports(sockets: Sockets):
    """Else an answer to a ping would not say that all are connected."""
    sockets.send(UtilityCall(0, "ping"))
    sockets.ready(1)
    assert sockets.nothing_comes()
    sockets.ready(0)
    for idx in range(NUM_ENGINES):
        assert sockets.received(idx) == UtilityCall(0, "ping")


def ready(sockets: Sockets) -> None:
    for idx in range(NUM_ENGINES):
        sockets.ready(idx)


def test_a_request_goes_to_one_and_its_abort_to_all_behind_it(sockets: Sockets):
    ready(sockets)
    sockets.send(fake_request("a", list(range(20))))
    sockets.send(AbortRequests(["a"]))
    both = [[sockets.received(idx)] for idx in range(NUM_ENGINES)]
    chosen = next(idx for idx in range(NUM_ENGINES) if isinstance(both[idx][0], EngineCoreRequest))
    assert both[chosen][0] == fake_request("a", list(range(20)))
    assert sockets.received(chosen) == both[1 - chosen][0] == AbortRequests(["a"])


def chosen_for(sockets: Sockets, number: int, prompt: list[int]) -> int:
    """Which engine core gets a request."""
    sockets.send(fake_request(f"r{number}", prompt))
    sockets.send(UtilityCall(number, "ping"))
    takers = []
    for idx in range(NUM_ENGINES):
        while isinstance(sockets.received(idx), EngineCoreRequest):
            takers.append(idx)
    (taker,) = takers
    return taker


def test_a_known_beginning_draws_and_a_load_repels(sockets: Sockets):
    ready(sockets)
    prompt = list(range(100))
    home = chosen_for(sockets, 1, prompt)
    assert chosen_for(sockets, 2, [7] * 40) != home
    assert chosen_for(sockets, 3, [*prompt, 1]) == home
    sockets.report(home, num_running=9, num_requests=2)
    sockets.report(1 - home, num_requests=1)
    assert chosen_for(sockets, 4, [*prompt, 2]) != home
    sockets.report(home, num_requests=2)
    sockets.report(1 - home, num_running=1, num_requests=2)
    sockets.send(UtilityCall(5, "reset_prefix_cache"))
    for idx in range(NUM_ENGINES):
        assert sockets.received(idx) == UtilityCall(5, "reset_prefix_cache")
    assert chosen_for(sockets, 6, [7] * 40) == home  # the idle one: nothing is known any more


def test_without_a_prefix_cache_only_loads_count(tmp_path: Path):
    sockets = Sockets(tmp_path, enable_prefix_caching=False)
    try:
        ready(sockets)
        chosen = [chosen_for(sockets, i, list(range(100))) for i in range(6)]
        assert sorted(chosen) == [0, 0, 0, 1, 1, 1]
    finally:
        sockets.close()
