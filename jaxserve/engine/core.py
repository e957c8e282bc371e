"""The engine core: the loop that schedules steps, has the workers run them and applies the results.

It lives in a process of its own behind sockets (`core_process.py`) or in the caller's
(`core_client.InProcClient`). Requests and aborts come in through a queue that any thread may fill;
outputs go to a callback.
"""

import logging
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
from llguidance import LLMatcher

from jaxserve.checkpoint import load_tokenizer
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import EngineConfig, check_resolved
from jaxserve.engine.executor import Executor
from jaxserve.engine.kv_cache_manager import KVCacheManager
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler, StepPlan
from jaxserve.engine.structured_output import GrammarRefusedError, StructuredOutputs, warn_of_abort
from jaxserve.errors import EngineDeadError
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineOutput,
    FinishReason,
    ModelRunnerOutput,
    SchedulerStats,
    Shutdown,
    UtilityCall,
    UtilityResult,
)

logger = logging.getLogger(__name__)


class ExecutorFailed(msgspec.Struct, frozen=True):
    """Wakes the loop: a worker died, perhaps while nothing runs."""


class InputFailed(msgspec.Struct, frozen=True):
    """Wakes the loop: a thread that serves it failed."""

    error: BaseException


class GrammarCompiled(msgspec.Struct, frozen=True):
    """Wakes the loop: a request's grammar is compiled, or cannot be."""

    request: Request
    matcher: Future[LLMatcher]


CoreInput = (
    Request
    | AbortRequests
    | UtilityCall
    | Shutdown
    | ExecutorFailed
    | InputFailed
    | GrammarCompiled
)


class EngineCore:
    """Scheduler and executor, joined by the step loop.

    Any thread may fill `inputs` and call `make_request`; the rest belongs to the thread that runs
    the loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        emit: Callable[[int, EngineOutput], None],
        *,
        num_clients: int = 1,
        reports_steps: bool = False,
        clock: Callable[[], float] = time.time,
        tokenizer: Callable[[], Tokenizer] | None = None,
    ):
        """config: resolved.  executor: started.  emit: gets (client_idx, message).
        reports_steps: whether one more client, after all others, hears of each step.
        tokenizer: loads it, for the first grammar; the checkpoint's by default.
        """
        self.inputs: queue.SimpleQueue[CoreInput] = queue.SimpleQueue()
        self._config = check_resolved(config)
        self._executor = executor
        self._emit = emit
        self._engine_idx = config.parallel.data_parallel_rank
        self._num_clients = num_clients
        self._reports_steps = reports_steps
        self._clock = clock
        self._scheduler = _make_scheduler(config)
        info = config.info
        self._grammars = StructuredOutputs(
            tokenizer or (lambda: load_tokenizer(info.path)), info.vocab_size
        )
        # Requests that wait for their grammar, by id.
        self._compiling: dict[str, Request] = {}
        self._utility_calls: deque[UtilityCall] = deque()
        # Steps that the workers have and whose results are not collected.
        self._in_flight: deque[StepPlan] = deque()
        self._max_in_flight = 1 if config.scheduler.async_scheduling else 0
        self._num_requests = 0
        self._num_compiles = 0
        self._stats_known_to_all: SchedulerStats | None = None
        self._is_running = True

    @property
    def has_work(self) -> bool:
        """Whether a step is in flight or can be planned."""
        return bool(self._in_flight) or self._scheduler.has_unfinished

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar; `inputs` will say when it is compiled."""
        return bool(self._compiling)

    def make_request(self, message: EngineCoreRequest) -> Request:
        """A request for `inputs`: its prompt blocks hashed, its grammar being compiled."""
        if message.grammar is not None:
            self._grammars.compile(message.grammar)
        cache = self._config.cache
        return Request.from_message(
            message,
            now_s=self._clock(),
            block_size=cache.block_size,
            hash_blocks=cache.enable_prefix_caching,
        )

    def run(self) -> None:
        """The loop: steps while there is work, sleeps while there is none, ends on Shutdown.

        Raises:
          EngineDeadError: no further step can be run; `str()` is the root cause.
        """
        while self._is_running:
            self.take_inputs()
            self.run_utility_calls()
            if self.has_work:
                self.step()
            else:
                self.sleep()

    def step(self) -> None:
        """Plans and sends a step; collects the oldest one when enough are in flight.

        With async scheduling the workers run one step while the next is planned, else the step
        collected is the one just sent. Grammars are asked what a step may sample while its forward
        pass runs, and once all steps before it are collected.
        """
        plan = self._scheduler.schedule(self._clock())
        if plan is not None:
            self._executor.execute(plan.message)
            self._in_flight.append(plan)
        if plan is None or len(self._in_flight) > 1:
            self._collect()
        if plan is not None and plan.masked:
            self._send_mask(plan)
        if len(self._in_flight) > self._max_in_flight:
            self._collect()

    def shutdown(self) -> None:
        """Compiles no more grammars. The executor is the caller's to shut down."""
        self._grammars.shutdown()

    def sleep(self) -> None:
        """Blocks until an input comes, and takes it. Not after Shutdown, which is the last."""
        if not self._is_running:
            return
        stats = self._stats()
        if stats != self._stats_known_to_all:
            self._emit_to_all(stats)
        self._take(self.inputs.get())

    def take_inputs(self) -> None:
        """Applies what has come: requests and aborts at once, utility calls when their turn is."""
        while not self.inputs.empty():
            self._take(self.inputs.get())

    def run_utility_calls(self) -> None:
        """Answers the utility calls that have come. Only between two steps."""
        while self._utility_calls:
            call = self._utility_calls.popleft()
            self._emit(call.client_idx, self._run_utility_call(call))

    def _collect(self) -> None:
        """Takes in the oldest step's results. Aborts that came meanwhile apply before them."""
        result = self._executor.collect()
        plan = self._in_flight.popleft()
        self.take_inputs()
        self._check_result(plan, result)
        tokens = result.sampled_token_ids
        outputs = self._scheduler.update_from_output(plan, tokens, self._clock(), result.extras)
        self._emit_outputs(outputs)

    def _send_mask(self, plan: StepPlan) -> None:
        masked = self._grammars.mask(plan.message.step_id, plan.masked)
        self._executor.sample(masked.mask)
        # More than fits the next step's padding would cost time where steps are not short of work.
        num_rows = len(plan.scheduled)
        padded = 1 << (num_rows - 1).bit_length()
        room = max(padded, self._config.scheduler.jump_ahead_tokens) - num_rows
        for request, token_ids in masked.forced:
            self._scheduler.force_tokens(request, token_ids[:room])
            room -= len(token_ids[:room])
        if masked.ended:
            self._emit_outputs([self._scheduler.end(*ended) for ended in masked.ended])

    def _take(self, item: CoreInput) -> None:
        match item:
            case Request():
                self._take_request(item)
            case GrammarCompiled():
                self._take_grammar(item.request, item.matcher)
            case AbortRequests():
                self._scheduler.finish_requests(item.request_ids, FinishReason.ABORT)
                for request_id in item.request_ids:
                    self._compiling.pop(request_id, None)
            case UtilityCall():
                self._utility_calls.append(item)
            case Shutdown():
                self._is_running = False
            case InputFailed():
                raise item.error
            case ExecutorFailed():
                self._executor.check()
                raise AssertionError("the executor reported a failure and has none")

    def _take_request(self, request: Request) -> None:
        self._num_requests += 1
        if request.grammar is None:
            self._scheduler.add_request(request)
            return
        self._compiling[request.request_id] = request
        matcher = self._grammars.compile(request.grammar)
        matcher.add_done_callback(lambda done: self.inputs.put(GrammarCompiled(request, done)))

    def _take_grammar(self, request: Request, matcher: Future[LLMatcher]) -> None:
        if self._compiling.get(request.request_id) is not request:  # aborted meanwhile
            return
        del self._compiling[request.request_id]
        error = matcher.exception()
        if error is None:
            request.matcher = matcher.result().deep_copy()
            self._scheduler.add_request(request)
            return
        if isinstance(error, GrammarRefusedError):
            warn_of_abort(error)
        else:
            logger.error("no grammar can be compiled, a request is aborted: %s", error)
        output = EngineCoreOutput(request.request_id, [], FinishReason.ABORT)
        self._emit_outputs([(request.client_idx, output)])

    def _check_result(self, plan: StepPlan, result: ModelRunnerOutput) -> None:
        assert result.step_id == plan.message.step_id, (result.step_id, plan)
        if result.num_compiles == self._num_compiles:
            return
        self._num_compiles = result.num_compiles
        text = f"{result.num_compiles} compilations after warm-up"
        if self._config.worker.forbid_compile:
            raise EngineDeadError(f"{text}, refused by --forbid-compile; {plan}")
        logger.warning("%s; %s", text, plan)

    def _emit_outputs(self, outputs: list[tuple[int, EngineCoreOutput]]) -> None:
        """One message for each client that has outputs; a step without any reports to all."""
        stats = self._stats()
        if not outputs:
            self._emit_to_all(stats)
            return
        by_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for client_idx, output in outputs:
            by_client[client_idx].append(output)
        now_s = self._clock()
        for client_idx, mine in by_client.items():
            self._emit(client_idx, EngineCoreOutputs(mine, stats, now_s, self._engine_idx))
        if self._reports_steps:
            report = EngineCoreOutputs([], stats, now_s, self._engine_idx)
            self._emit(self._num_clients, report)
        if len(by_client) == self._num_clients:
            self._stats_known_to_all = stats

    def _emit_to_all(self, stats: SchedulerStats) -> None:
        message = EngineCoreOutputs([], stats, self._clock(), self._engine_idx)
        for client_idx in range(self._num_clients + self._reports_steps):
            self._emit(client_idx, message)
        self._stats_known_to_all = stats

    def _stats(self) -> SchedulerStats:
        stats = self._scheduler.stats()
        return msgspec.structs.replace(
            stats,
            num_requests=self._num_requests,
            num_waiting=stats.num_waiting + len(self._compiling),
            num_compiles_after_ready=self._num_compiles,
        )

    def _run_utility_call(self, call: UtilityCall) -> UtilityResult:
        method = _UTILITY_METHODS.get(call.method)
        if method is None:
            return UtilityResult(call.call_id, error=f"no such utility method: {call.method}")
        try:
            return UtilityResult(call.call_id, value=method(self._scheduler, *call.args))
        except TypeError as error:
            return UtilityResult(call.call_id, error=f"{call.method}: {error}")


# What a UtilityCall may name: a function of the scheduler and the call's arguments.
_UTILITY_METHODS: dict[str, Callable[..., Any]] = {
    "ping": lambda scheduler: True,
    "reset_prefix_cache": Scheduler.reset_prefix_cache,
}


def _make_scheduler(config: EngineConfig) -> Scheduler:
    cache, scheduler = config.cache, config.scheduler
    return Scheduler(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_mixed_tokens=scheduler.max_num_mixed_tokens,
        max_model_len=config.model.max_model_len,
        policy=scheduler.scheduling_policy,
        kv=KVCacheManager(
            num_kv_blocks=cache.num_kv_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
        ),
    )
