"""The script for a lent GPU runs to its end, here with tiny shapes in plain JAX."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_session.py"


def _run(*argv: str) -> tuple[int, list[dict]]:
    """(exit code, the JSON lines)"""
    command = [sys.executable, SCRIPT, "--smoke", *argv]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.takes_minutes
def test_every_part_gives_its_figures():
    code, lines = _run()
    outcomes = {line["part"]: line["outcome"] for line in lines if "outcome" in line}
    parts = ("environment", "numbers", "decode", "prefill", "serve", "matmuls", "tune")
    assert outcomes == dict.fromkeys(parts, "done")
    assert code == 0
    figures = {(line["part"], line.get("what")): line for line in lines}
    for part, what, figure in (
        ("decode", "xla", "of_copy"),
        ("decode", "cuDNN", "of_copy"),
        ("prefill", "xla", "of_matmul"),
        ("prefill", "xla, mma.sync", "of_matmul"),
        ("prefill", "cuDNN", "of_matmul"),
        ("serve", "second", "output_tokens_per_s"),
        ("matmuls", "cuBLAS", "weight_bytes_per_s"),
        ("matmuls", "XLA's own", "weight_bytes_per_s"),
        ("tune", "tried", "seconds"),
    ):
        assert figures[part, what][figure] > 0
    (numbers,) = (line for line in lines if line.get("config") == "long")
    assert numbers["is_right"] and numbers["max_error"] > 0


def test_a_part_that_takes_too_long_is_cut_off():
    code, lines = _run("--parts", "environment,numbers", "--limit", "0.2")
    assert code == 1
    assert [(line["part"], line["outcome"]) for line in lines if "outcome" in line] == [
        ("environment", "cut off after 0 s")
    ]
