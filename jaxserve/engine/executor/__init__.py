"""How the engine core reaches the workers: what every executor can do, and which one to use."""

import importlib
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.messages import GrammarMask, ModelRunnerOutput, SchedulerOutput

WORKER_CLASS = "jaxserve.worker.worker:Worker"


class Executor(Protocol):
    """Runs step plans on the workers, in order. Used by one thread, `failure_fds` aside."""

    def start(self) -> EngineConfig:
        """Blocks until the workers are warm; returns the resolved config.

        Raises:
          UserError: the workers cannot do what the config asks for.
          EngineDeadError: a worker failed.
        """
        ...

    def execute(self, plan: SchedulerOutput) -> None:
        """Hands a step to the workers; returns at once.

        Raises:
          EngineDeadError: a worker failed; `str()` is the root cause.
        """
        ...

    def sample(self, mask: GrammarMask) -> None:
        """Hands the workers the mask of the step handed to them last, which awaits it; returns at
        once.

        Raises:
          EngineDeadError: a worker failed; `str()` is the root cause.
        """
        ...

    def collect(self) -> ModelRunnerOutput:
        """Blocks for the result of the oldest step not collected yet.

        Raises:
          EngineDeadError: a worker failed or takes too long; `str()` is the root cause.
        """
        ...

    def failure_fds(self) -> list[int]:
        """Descriptors that become readable when a worker fails; valid after `start`."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError, with the root cause, if a worker failed."""
        ...

    def shutdown(self) -> None:
        """Ends the workers, within seconds. Called once, also after a failure."""
        ...


def make_executor(config: EngineConfig, worker_class: str = WORKER_CLASS) -> Executor:
    """The executor that `config.worker.executor` names. worker_class: "module:Class"."""
    # Imported here: a worker process needs the ring buffer of this package, nothing else.
    if config.worker.executor == "in_process":
        from jaxserve.engine.executor.in_process import InProcessExecutor

        return InProcessExecutor(config, lambda config: load_class(worker_class)(config))
    from jaxserve.engine.executor.remote_hosts import RemoteHosts
    from jaxserve.engine.executor.workers import WorkersExecutor

    hosts = RemoteHosts(config) if config.parallel.num_hosts > 1 else None
    return WorkersExecutor(config, worker_class, hosts)


def load_class(path: str) -> Any:
    """The class that "module:Class" names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
