"""schemathesis: whatever /openapi.json allows or forbids, no answer is a 5xx."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from tests.clients.shared import FLAGS, MODEL, PYTHON
from tests.e2e.live_server import live_server

# A dev dependency, so it runs in CI; other Pythons that run these tests may lack it.
if importlib.util.find_spec("schemathesis") is None:
    pytest.skip("the package schemathesis is not installed", allow_module_level=True)
pytestmark = pytest.mark.client("schemathesis")

NUM_EXAMPLES = 20
# What bounds the output of each body that generates.
LIMITS = {
    "ChatCompletionRequest": "max_completion_tokens",
    "CompletionRequest": "max_tokens",
    "ResponsesRequest": "max_output_tokens",
    "MessagesRequest": "max_tokens",
}


def reachable(document: dict) -> dict:
    """The same document with the name of the model, and few short outputs: else few requests get
    past the first check, and those for long."""
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [MODEL]}
        if name in LIMITS:
            schema["properties"][LIMITS[name]] = {"type": "integer", "minimum": 1, "maximum": 4}
            schema["required"] = sorted({*schema["required"], LIMITS[name]})
        if "n" in schema["properties"]:
            schema["properties"]["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
    return document


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One with a short context, where a request without a limit comes to its end soon."""
    log = tmp_path_factory.mktemp("schemathesis") / "log"
    with live_server(log, "--max-model-len=128", *FLAGS, python=PYTHON) as running:
        yield running


@pytest.mark.parametrize(
    ("phases", "least", "least_answered"),
    [("examples,fuzzing", 200, 5), pytest.param("coverage", 1000, 40, marks=pytest.mark.slow)],
)
def test_no_5xx(server, tmp_path, phases, least, least_answered):
    served = tmp_path / "openapi.json"
    served.write_text(json.dumps(reachable(json.loads(server.get("/openapi.json")[1]))))
    before = server.metric("request_success_total")
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(served), "--url", f"http://127.0.0.1:{server.port}",
        "--exclude-path-regex", "lora_adapter$",  # 501 by design
        "--checks", "not_a_server_error", "--mode", "all", "--phases", phases,
        "--max-examples", str(NUM_EXAMPLES), "--request-timeout", "120",
        "--generation-deterministic", "--workers", "8", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    num_tested = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert num_tested and int(num_tested[1]) == int(num_tested[2]) > least, done.stdout[-2000:]
    assert server.metric("request_success_total") - before > least_answered, (
        "few requests reach the engine"
    )
    assert server.get("/health")[0] == 200
    server.wait_metric("num_requests_running", 0)
    server.wait_metric("num_requests_waiting", 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert "Traceback" not in server.log, server.log[-5000:]
