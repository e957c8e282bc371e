"""What every test gets: JAX on the CPU, a compilation cache that outlives the run, the model."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jaxserve.checkpoint.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent

# A run in the background of a shell ignores Ctrl-C, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Read by jax when a test first imports it, and by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also what is left out for its time")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out without --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long and has a shorter test beside it."""
    if not config.getoption("slow"):
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file; fetched when it is not there."""
    from jaxserve.checkpoint import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model_path: Path) -> "Tokenizer":
    """The demo model's tokenizer."""
    from jaxserve.checkpoint import load_tokenizer

    return load_tokenizer(demo_model_path)
