"""One float32 worker with the demo model for the whole session; engines on top of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.checkpoint import load_model_info
from jaxserve.config import EngineConfig, replace, resolve_for_model
from jaxserve.worker import sizing
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.worker import Worker
from tests.e2e.engine import Engine
from tests.e2e.sizes import SIZES


@pytest.fixture(scope="session")
def demo_config(demo_model_path: Path) -> EngineConfig:
    """Small, in float32, nothing may compile after warm-up."""
    config = replace(
        EngineConfig(),
        model="smollm2-135m",
        **SIZES,
        max_logprobs=-1,
        forbid_compile=True,
        executor="in_process",
    )
    return resolve_for_model(config, load_model_info(demo_model_path))


@pytest.fixture(scope="session")
def demo_worker(demo_config: EngineConfig) -> tuple[Worker, EngineConfig]:
    """The loaded worker and its resolved config."""
    worker = Worker(demo_config)
    return worker, worker.load()


@pytest.fixture(scope="session")
def make_engine(demo_worker: tuple[Worker, EngineConfig]) -> Callable[..., Engine]:
    """Makes an engine with an empty batch; keyword arguments change its (scheduler's) config."""
    worker, config = demo_worker

    def make(**changes: object) -> Engine:
        old = worker._runner
        assert old is not None
        worker._runner = ModelRunner(
            old._programs,
            old._params,
            old._state,
            old._options,
            sizing.blocks_per_sequence(config),
        )
        return Engine(config, worker._runner, worker, **changes)

    return make
