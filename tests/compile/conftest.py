"""What compile tests get: compilers in processes of their own, and a table at the end."""

from collections.abc import Iterator

import pytest

from tests.compile.compilers import Compilers, by_capability

_ROWS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="compile a subset that is chosen well")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []
    config.addinivalue_line("markers", "takes_minutes: left out with --fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked as taking minutes, if it is to be fast."""
    if config.getoption("fast", default=False):
        slow = [item for item in items if "takes_minutes" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed after the tests."""
    return request.config.stash[_ROWS]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash[_ROWS]
    if rows:
        terminalreporter.section("compiled")
        terminalreporter.write("\n".join([*rows, ""]))


@pytest.fixture(scope="session")
def compilers(request: pytest.FixtureRequest) -> Iterator[Compilers]:
    """Compiles; what the chosen tests will ask for is begun at once."""
    from pallas_kernels.aot import COMPILED_CHIPS, missing_reason

    reason = next(filter(None, map(missing_reason, COMPILED_CHIPS.values())), None)
    if reason is not None:
        pytest.fail(reason, pytrace=False)
    made = Compilers()
    params = [getattr(item, "callspec", None) for item in request.session.items]
    jobs = [job for spec in params if spec for job in spec.params.get("jobs", ())]
    for job in by_capability(jobs):
        made.submit(job)
    yield made
    made.close()
