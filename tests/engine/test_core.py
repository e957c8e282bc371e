"""The step loop: order of its parts, who gets which message, what an idle engine does."""

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore, ExecutorFailed, InputFailed
from jaxserve.engine.executor.in_process import InProcessExecutor
from jaxserve.engine.in_proc_client import InProcClient
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineOutput,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    Shutdown,
    UtilityCall,
    UtilityResult,
)
from tests.fakes import (
    CompilingWorker,
    FakeWorker,
    fake_config,
    fake_embedding,
    fake_logprobs,
    fake_output,
    fake_request,
)

WAIT_S = 20.0


class RecordingExecutor(InProcessExecutor):
    """Writes down what is called; `during_collect` runs while a step does."""

    def __init__(self, config: EngineConfig, worker_factory: Callable = FakeWorker):
        super().__init__(config, worker_factory)
        self.calls: list[str] = []
        self.during_collect: Callable[[int], None] = lambda step_id: None
        self.start()

    def execute(self, plan: SchedulerOutput) -> None:
        self.calls.append(f"execute {plan.step_id}")
        super().execute(plan)

    def collect(self) -> ModelRunnerOutput:
        output = super().collect()
        self.calls.append(f"collect {output.step_id}")
        self.during_collect(output.step_id)
        return output


class Engine:
    """An engine core on a fake worker, with what it emitted."""

    def __init__(self, *, num_clients: int = 1, worker: Callable = FakeWorker, **config: object):
        resolved = fake_config(**config)
        self.executor = RecordingExecutor(resolved, worker)
        self.emitted: list[tuple[int, EngineOutput]] = []
        self.core = EngineCore(
            resolved,
            self.executor,
            lambda client_idx, message: self.emitted.append((client_idx, message)),
            num_clients=num_clients,
        )

    def add(self, request_id: str, prompt: list[int], **fields: Any) -> None:
        self.core.inputs.put(self.core.make_request(fake_request(request_id, prompt, **fields)))

    def run_until_idle(self) -> None:
        self.core.take_inputs()
        while self.core.has_work:
            self.core.step()

    def messages(self, client_idx: int) -> list[EngineCoreOutputs]:
        return [
            message
            for idx, message in self.emitted
            if idx == client_idx and isinstance(message, EngineCoreOutputs)
        ]

    def request_ids(self) -> dict[int, list[list[str]]]:
        """For each client the ids in each message."""
        ids: dict[int, list[list[str]]] = {}
        for client_idx, message in self.emitted:
            assert isinstance(message, EngineCoreOutputs)
            outputs = [output.request_id for output in message.outputs]
            ids.setdefault(client_idx, []).append(outputs)
        return ids

    def tokens(self) -> dict[str, list[int]]:
        """Everything generated, by request id."""
        tokens: dict[str, list[int]] = defaultdict(list)
        for _, message in self.emitted:
            assert isinstance(message, EngineCoreOutputs)
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
        return tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_kv_blocks", [512, 20])
def test_every_request_gets_its_tokens(async_scheduling: bool, num_kv_blocks: int) -> None:
    """20 blocks are too few for all at once: requests are preempted and computed again."""
    engine = Engine(async_scheduling=async_scheduling, num_kv_blocks=num_kv_blocks)
    prompts = {f"r{i}": [i] * (7 * i + 1) for i in range(20)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=len(prompt) % 40 + 1)
    engine.run_until_idle()
    assert engine.tokens() == {
        request_id: fake_output(prompt, len(prompt) % 40 + 1)
        for request_id, prompt in prompts.items()
    }
    stats = engine.messages(0)[-1].stats
    assert (stats.num_preemptions > 0) == (num_kv_blocks == 20)
    assert (stats.num_running, stats.num_waiting, stats.num_used_kv_blocks) == (0, 0, 0)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_kv_blocks", [512, 20])
def test_what_comes_beside_tokens(async_scheduling: bool, num_kv_blocks: int) -> None:
    """In pieces for long prompts, and again after a preemption."""
    engine = Engine(async_scheduling=async_scheduling, num_kv_blocks=num_kv_blocks)
    prompts = {f"r{i}": [i] * (9 * i + 1) for i in range(16)}
    asks: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1}, {"pooling": "mean", "max_tokens": 1}, {},
        {"logprob_token_ids": (5,), "max_tokens": 40},
    ]  # fmt: skip
    for i, (request_id, prompt) in enumerate(prompts.items()):
        engine.add(request_id, prompt, **{"max_tokens": 20} | asks[i % 4])
    engine.run_until_idle()
    outputs = [output for message in engine.messages(0) for output in message.outputs]
    for i, (request_id, prompt) in enumerate(prompts.items()):
        first, *later = [output for output in outputs if output.request_id == request_id]
        assert all(output.prompt_logprobs is None for output in later)
        if i % 4 == 0:
            pieces = first.prompt_logprobs
            assert pieces is not None and sum(piece.num_tokens for piece in pieces) == 9 * i
            assert b"".join(p.ranks for p in pieces) == fake_logprobs(prompt[1:]).ranks
        for output in [first, *later]:
            has_logprobs = i % 4 in (0, 3)
            expected = fake_logprobs(output.new_token_ids) if has_logprobs else None
            assert output.logprobs == expected
            assert output.embedding == (fake_embedding(prompt) if i % 4 == 1 else None)
    assert (engine.messages(0)[-1].stats.num_preemptions > 0) == (num_kv_blocks == 20)


def test_async_scheduling_plans_one_step_ahead() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=4)
    engine.run_until_idle()
    assert engine.executor.calls == [
        "execute 0", "execute 1", "collect 0", "execute 2", "collect 1", "execute 3", "collect 2",
        "collect 3",
    ]  # fmt: skip


def test_without_async_scheduling_no_step_is_in_flight() -> None:
    engine = Engine(async_scheduling=False)
    engine.add("a", [1, 2, 3], max_tokens=3)
    engine.run_until_idle()
    assert engine.executor.calls == [
        "execute 0", "collect 0", "execute 1", "collect 1", "execute 2", "collect 2",
    ]  # fmt: skip


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_abort_during_a_step_applies_before_its_results(async_scheduling: bool) -> None:
    engine = Engine(async_scheduling=async_scheduling)

    def abort(step_id: int) -> None:
        if step_id == 2:
            engine.core.inputs.put(AbortRequests(["a", "unknown"]))

    engine.executor.during_collect = abort
    engine.add("a", [1], max_tokens=10)
    engine.add("b", [2], max_tokens=10)
    engine.run_until_idle()
    assert engine.tokens() == {"a": fake_output([1], 2), "b": fake_output([2], 10)}


def test_a_request_may_be_aborted_as_soon_as_it_is_sent() -> None:
    engine = Engine()
    engine.add("a", [1])
    engine.core.inputs.put(AbortRequests(["a"]))
    engine.run_until_idle()
    assert engine.emitted == [] and engine.executor.calls == []


def test_one_message_a_step_for_each_client_with_outputs() -> None:
    engine = Engine(num_clients=3, async_scheduling=False)
    engine.add("a", [1], max_tokens=2, client_idx=0)
    engine.add("b", [2], max_tokens=1, client_idx=2)
    engine.add("c", [3], max_tokens=2, client_idx=2)
    engine.core.take_inputs()
    engine.core.step()
    assert engine.request_ids() == {0: [["a"]], 2: [["b", "c"]]}
    assert engine.messages(2)[0].outputs[0].finish_reason is FinishReason.LENGTH
    engine.core.step()
    assert engine.request_ids() == {0: [["a"], ["a"]], 2: [["b", "c"], ["c"]]}


def test_a_step_without_outputs_reports_to_everyone() -> None:
    engine = Engine(num_clients=2, async_scheduling=False, max_num_batched_tokens=16)
    engine.add("a", [1] * 40, max_tokens=1)
    engine.core.take_inputs()
    engine.core.step()
    assert engine.request_ids() == {0: [[]], 1: [[]]}
    assert engine.messages(0)[0].stats.num_running == 1


def test_all_clients_know_the_stats_of_an_idle_engine() -> None:
    """Also when an abort, which nobody answers, was the last thing that happened."""
    engine = Engine(num_clients=2, async_scheduling=False)
    engine.core.inputs.put(AbortRequests([]))
    engine.core.sleep()
    assert [m.stats.num_running for m in engine.messages(1)] == [0]
    engine.add("a", [1], max_tokens=5, client_idx=1)
    engine.core.take_inputs()
    engine.core.step()
    assert [m.stats.num_running for m in engine.messages(1)] == [0, 1]
    engine.core.inputs.put(AbortRequests(["a"]))
    engine.core.take_inputs()
    for _ in range(2):
        engine.core.inputs.put(AbortRequests([]))
        engine.core.sleep()
    # Said once to each, not every time the engine goes to sleep.
    assert [m.stats.num_running for m in engine.messages(1)] == [0, 1, 0]
    assert [m.stats.num_running for m in engine.messages(0)] == [0, 0]
    # A step that concerned only one client is news to the other.
    engine.add("b", [1], max_tokens=1, client_idx=1)
    engine.core.take_inputs()
    engine.core.step()
    engine.core.inputs.put(AbortRequests([]))
    engine.core.sleep()
    assert engine.messages(0)[-1].stats.num_steps == 2


def test_utility_calls_run_between_steps_and_are_answered() -> None:
    engine = Engine(num_clients=2, async_scheduling=False)
    engine.add("a", [1] * 33, max_tokens=3)

    def call(step_id: int) -> None:
        engine.core.inputs.put(UtilityCall(step_id, "reset_prefix_cache", [], 1))

    engine.executor.during_collect = call
    engine.core.take_inputs()
    engine.core.step()
    assert not any(isinstance(message, UtilityResult) for _, message in engine.emitted)
    engine.core.run_utility_calls()
    # Its blocks are in use.
    assert engine.emitted[-1] == (1, UtilityResult(0, value=False))
    engine.executor.during_collect = lambda step_id: None
    engine.run_until_idle()
    for call_id, method, args in [
        (7, "reset_prefix_cache", []),
        (8, "__init__", []),
        (9, "reset_prefix_cache", [1]),
    ]:
        engine.core.inputs.put(UtilityCall(call_id, method, args))
    engine.core.take_inputs()
    engine.emitted.clear()
    engine.core.run_utility_calls()
    results = [message for _, message in engine.emitted]
    assert results[0] == UtilityResult(7, value=True)
    assert results[1] == UtilityResult(8, error="no such utility method: __init__")
    assert isinstance(results[2], UtilityResult) and results[2].call_id == 9
    assert "takes 1 positional argument but 2 were given" in str(results[2].error)


def test_compilations_after_warm_up_are_counted() -> None:
    engine = Engine(worker=CompilingWorker)
    engine.add("a", [1], max_tokens=5)
    engine.run_until_idle()
    counts = [message.stats.num_compiles_after_ready for message in engine.messages(0)]
    assert counts == [0, 0, 1, 1, 1]


def test_compilations_after_warm_up_can_be_forbidden() -> None:
    engine = Engine(worker=CompilingWorker, forbid_compile=True)
    engine.add("a", [1], max_tokens=5)
    with pytest.raises(EngineDeadError, match=r"1 compilations .* --forbid-compile; step 2: a:1"):
        engine.run_until_idle()


@pytest.fixture
def running() -> Iterator[Engine]:
    """An engine whose loop runs in a thread."""
    engine = Engine()
    thread = threading.Thread(target=engine.core.run)
    thread.start()
    yield engine
    engine.core.inputs.put(Shutdown())
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_the_loop_wakes_up_for_requests_and_sleeps_without(running: Engine) -> None:
    for num_requests in (1, 2):
        running.add(f"a{num_requests}", [1, 2, 3], max_tokens=4)
        deadline_s = time.monotonic() + WAIT_S
        while len(running.tokens()) < num_requests or running.core.has_work:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
    before_s = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before_s < 0.02
    assert running.tokens()["a2"] == fake_output([1, 2, 3], 4)


def test_results_of_the_wrong_step_are_refused() -> None:
    class Confused(FakeWorker):
        def collect(self) -> ModelRunnerOutput:
            return ModelRunnerOutput(7, super().collect().sampled_token_ids)

    engine = Engine(worker=Confused)
    engine.add("a", [1])
    with pytest.raises(AssertionError, match="7"):
        engine.run_until_idle()


def test_shutdown_ends_the_loop_with_requests_running() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=1000)

    def shut_down(step_id: int) -> None:
        if step_id == 3:
            engine.core.inputs.put(Shutdown())

    engine.executor.during_collect = shut_down
    engine.core.run()
    assert engine.executor.calls[-1] == "collect 3"


def test_failures_of_threads_and_workers_end_the_loop() -> None:
    engine = Engine()
    engine.core.inputs.put(InputFailed(ValueError("no such message")))
    with pytest.raises(ValueError, match="no such message"):
        engine.core.run()

    class DeadExecutor(RecordingExecutor):
        def check(self) -> None:
            raise EngineDeadError("worker 0 was killed")

    core = EngineCore(fake_config(), DeadExecutor(fake_config()), lambda idx, message: None)
    core.inputs.put(ExecutorFailed())
    with pytest.raises(EngineDeadError, match="worker 0 was killed"):
        core.run()


@pytest.fixture
def client() -> Iterator[InProcClient]:
    client = InProcClient(fake_config(executor="in_process"), worker_class="tests.fakes:FakeWorker")
    client.start()
    yield client
    client.shutdown()


def generate(client: InProcClient) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    while client.has_work:
        for output in client.step():
            tokens[output.request_id] += output.new_token_ids
    return tokens


def test_in_process_client_generates(client: InProcClient) -> None:
    client.add_request(fake_request("a", [1] * 200, max_tokens=6))
    client.add_request(fake_request("b", [2], max_tokens=3))
    assert generate(client) == {"a": fake_output([1] * 200, 6), "b": fake_output([2], 3)}
    assert client.step() == []
    assert client.stats.num_steps == 9 and client.stats.num_running == 0
    assert client.call("reset_prefix_cache") is True
    with pytest.raises(ValueError, match="no such utility method"):
        client.call("shutdown")


def test_in_process_client_aborts(client: InProcClient) -> None:
    client.add_request(fake_request("a", [1], max_tokens=100))
    client.add_request(fake_request("b", [2], max_tokens=5))
    client.step()
    client.abort(["a"])
    assert generate(client) == {"b": fake_output([2], 5)[1:]}


def test_in_process_client_survives_ctrl_c(
    client: InProcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the call that runs a step and the bookkeeping after it."""
    collect = FakeWorker.collect
    handler = signal.getsignal(signal.SIGINT)

    def collect_and_interrupt(worker: FakeWorker) -> ModelRunnerOutput:
        result = collect(worker)
        signal.raise_signal(signal.SIGINT)
        return result

    client.add_request(fake_request("a", [1], max_tokens=10))
    client.step()
    with monkeypatch.context() as patch:
        patch.setattr(FakeWorker, "collect", collect_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.step()
    assert signal.getsignal(signal.SIGINT) is handler
    # The interrupted step's results come with the next call.
    assert generate(client) == {"a": fake_output([1], 10)[1:]}


def test_in_process_client_that_cannot_start() -> None:
    client = InProcClient(fake_config(), worker_class="tests.fakes:UnservableWorker")
    with pytest.raises(UserError):
        client.start()
    client.shutdown()
