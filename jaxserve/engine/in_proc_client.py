"""An engine core in the caller's process, for the offline class `LLM`."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.executor import WORKER_CLASS, make_executor
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineOutput,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
)


class InProcClient:
    """An engine core in the caller's process, stepped by the caller: no sockets, no threads.

    `start`, then any of the others, then `shutdown`. One thread.
    """

    def __init__(self, config: EngineConfig, *, worker_class: str = WORKER_CLASS):
        """config: resolved for its model; `worker.executor` says where the model runs.
        worker_class: "module:Class".
        """
        self._executor = make_executor(config, worker_class)
        self._core: EngineCore | None = None
        self._is_shut_down = False
        self._emitted: list[EngineOutput] = []
        self.stats = SchedulerStats()

    def start(self) -> EngineConfig:
        """Waits until the workers are warm; returns the resolved config.

        Raises:
          UserError: the config cannot be served.
          EngineDeadError: a worker failed. After either, everything is shut down.
        """
        try:
            config = self._executor.start()
            self._core = EngineCore(config, self._executor, self._emit)
        except BaseException:
            self.shutdown()
            raise
        return config

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        core = self._running_core
        return core.has_work or core.is_compiling or not core.inputs.empty()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a sequence; its id is unique among the unfinished ones."""
        core = self._running_core
        core.inputs.put(core.make_request(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; unknown ids are ignored. Nothing more comes for them."""
        self._running_core.inputs.put(AbortRequests(list(request_ids)))

    def call(self, method: str, *args: Any) -> Any:
        """Runs a utility method of the engine core, such as `reset_prefix_cache`."""
        core = self._running_core
        core.inputs.put(UtilityCall(0, method, list(args)))
        core.take_inputs()
        core.run_utility_calls()
        result = self._emitted.pop()
        assert isinstance(result, UtilityResult), result
        if result.error is not None:
            raise ValueError(result.error)
        return result.value

    def step(self) -> list[EngineCoreOutput]:
        """Runs until the results of a step are in and returns them, perhaps none; [] without work.

        Ctrl-C takes effect between two steps, so that it leaves the engine usable: abort what runs
        and go on. A second Ctrl-C does not wait.

        Raises:
          EngineDeadError: no further step can be run; `str()` is the root cause.
        """
        core = self._running_core
        with _interrupt_deferred():
            core.take_inputs()
            while (core.has_work or core.is_compiling) and not self._emitted:
                core.step() if core.has_work else core.sleep()
        outputs: list[EngineCoreOutput] = []
        for message in self._emitted:
            assert isinstance(message, EngineCoreOutputs), message
            outputs += message.outputs
            self.stats = message.stats
        self._emitted.clear()
        return outputs

    def shutdown(self) -> None:
        """Ends the workers. May be called twice."""
        if self._core is not None:
            self._core.shutdown()
        self._core = None
        if not self._is_shut_down:
            self._is_shut_down = True
            self._executor.shutdown()

    @property
    def _running_core(self) -> EngineCore:
        assert self._core is not None, "not started, or shut down"
        return self._core

    def _emit(self, client_idx: int, message: EngineOutput) -> None:
        self._emitted.append(message)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Holds a KeyboardInterrupt back until the block has ended; a second one is not held back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    was_interrupted = False

    def defer(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            raise KeyboardInterrupt
        was_interrupted = True

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if was_interrupted:
        raise KeyboardInterrupt
