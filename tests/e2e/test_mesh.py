"""The demo model on two virtual devices, which do not divide its 3 KV heads."""

from pathlib import Path

from tests.e2e.engine import GOLDENS
from tests.e2e.live_server import live_server
from tests.e2e.sizes import MESH_SIZES, flags_of


def test_two_devices_serve_the_tokens_of_one(tmp_path: Path):
    golden = next(g for g in GOLDENS["prompts"] if g["name"] == "english")
    flags = ("--mesh=1x2", "--forbid-compile", *flags_of(MESH_SIZES))
    with live_server(tmp_path / "log", *flags) as server:
        body = {"model": "smollm2-135m", "prompt": golden["prompt_ids"], "max_tokens": 32}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["token_ids"] == golden["output_ids"][:32]
        assert "mesh = 1x2: each device has 1/2 of the weights; 3 dummy query heads" in server.log
