"""aiperf: a load of 10 requests without an error, and its counts agree with the server's."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.shared import MODEL
from tests.e2e.live_server import ROOT

# Heavy: only scripts/clients installs it, and fails when this is skipped there.
if importlib.util.find_spec("aiperf") is None:
    pytest.skip("the package aiperf is not installed", allow_module_level=True)
pytestmark = pytest.mark.client("aiperf")

NUM_REQUESTS = 10
OUTPUT_LEN = 8


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_ten_requests(server, base_url, tmp_path, endpoint):
    before = server.metric("generation_tokens_total")
    command = [
        Path(sys.executable).with_name("aiperf"), "profile",
        "--model", MODEL, "--url", base_url, "--endpoint-type", endpoint, "--streaming",
        "--request-count", NUM_REQUESTS, "--concurrency", 4, "--isl", 24, "--osl", OUTPUT_LEN,
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--tokenizer", ROOT / "tests" / "goldens" / "tiny_llama",
        "--ui", "none", "--no-gpu-telemetry", "--random-seed", 1,
        "--artifact-dir", tmp_path / "run",
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (tmp_path / "run" / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == NUM_REQUESTS
    assert all(record.get("error") is None for record in records), records
    report = json.loads((tmp_path / "run" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["output_sequence_length"]["avg"] == OUTPUT_LEN
    assert report["time_to_first_token"]["avg"] > 0 and report["inter_token_latency"]["avg"] > 0
    made = server.metric("generation_tokens_total") - before
    assert made == NUM_REQUESTS * OUTPUT_LEN
