"""The demo model on two virtual devices, which do not divide its 3 KV heads."""

from pathlib import Path

from tests.e2e.engine import GOLDENS
from tests.e2e.live_server import live_server


def test_two_devices_serve_the_tokens_of_one(tmp_path: Path):
    golden = next(g for g in GOLDENS["prompts"] if g["name"] == "english")
    flags = "--mesh 1x2 --dtype float32 --max-model-len 256 --max-num-batched-tokens 16"
    flags += " --max-num-seqs 4 --num-kv-blocks 40 --forbid-compile"
    with live_server(tmp_path / "log", *flags.split()) as server:
        body = {"model": "smollm2-135m", "prompt": golden["prompt_ids"], "max_tokens": 32}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["token_ids"] == golden["output_ids"][:32]
        assert "mesh = 1x2: each device has 1/2 of the weights; 3 dummy query heads" in server.log
