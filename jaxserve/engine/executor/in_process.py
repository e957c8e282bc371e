"""The executor that runs one worker in the engine core's own process."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError, UserError
from jaxserve.messages import GrammarMask, ModelRunnerOutput, SchedulerOutput


class Worker(Protocol):
    """What executors and worker processes need of a worker (`worker/worker.py`).

    `execute` and `sample` are called by one thread, `collect` perhaps by another.
    """

    def load(self) -> EngineConfig:
        """Loads the model, warms up; returns the resolved config."""
        ...

    def execute(self, plan: SchedulerOutput) -> None:
        """Starts a step on the devices; samples too, unless the plan awaits a mask."""
        ...

    def sample(self, mask: GrammarMask) -> None:
        """Starts the sampling of the step started last, whose plan awaits this mask."""
        ...

    def collect(self) -> ModelRunnerOutput:
        """Blocks for the result of the oldest step not collected yet; its sampling has started."""
        ...


class InProcessExecutor:
    """One worker, called directly. A step cannot be timed out: nobody is there to interrupt it."""

    def __init__(self, config: EngineConfig, worker_factory: Callable[[EngineConfig], Worker]):
        self._config = config
        self._worker_factory = worker_factory
        self._worker: Worker | None = None
        self._failure: Exception | None = None

    def start(self) -> EngineConfig:
        self._worker = self._worker_factory(self._config)
        return self._worker.load()

    def execute(self, plan: SchedulerOutput) -> None:
        return self._run(lambda worker: worker.execute(plan))

    def sample(self, mask: GrammarMask) -> None:
        return self._run(lambda worker: worker.sample(mask))

    def collect(self) -> ModelRunnerOutput:
        return self._run(lambda worker: worker.collect())

    def failure_fds(self) -> list[int]:
        return []

    def check(self) -> None:
        if self._failure is not None:
            raise self._dead(self._failure)

    def shutdown(self) -> None:
        self._worker = None

    def _run[T](self, call: Callable[[Worker], T]) -> T:
        assert self._worker is not None, "not started"
        self.check()
        try:
            return call(self._worker)
        except Exception as error:
            raise self._dead(error) from error

    def _dead(self, error: Exception) -> EngineDeadError:
        self._failure = error
        return EngineDeadError(f"the worker failed: {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """An exception in one line: a UserError's problem, else its type and text, and the place of an
    assertion, which may have no text."""
    if isinstance(error, UserError):
        return error.problem
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = isinstance(error, AssertionError) and frames
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if is_ours else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
