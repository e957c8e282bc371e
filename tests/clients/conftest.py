"""One live server with the demo model for all clients.

Runs in the dev venv (clients that it has), and in the clients' own venv with `scripts/clients`.
"""

from collections.abc import Iterator

import pytest

from tests.clients.shared import CONTEXT, FLAGS, PYTHON
from tests.e2e.live_server import LiveServer, live_server


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "client(name): shows that the client with this name works")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A float32 server that may not compile after its start; it must end up idle."""
    log = tmp_path_factory.mktemp("clients") / "log"
    with live_server(log, CONTEXT, *FLAGS, python=PYTHON) as running:
        yield running
        running.wait_metric("num_requests_running", 0)
        running.wait_metric("num_requests_waiting", 0)
        assert running.metric("compiles_after_ready_total") == 0
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="session")
def base_url(server: LiveServer) -> str:
    """Without /v1."""
    return f"http://127.0.0.1:{server.port}"
