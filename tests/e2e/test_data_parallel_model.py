"""The demo model twice, on two virtual devices each, behind two API servers: the tokens of one."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.engine import GOLDENS
from tests.e2e.live_server import MODEL, live_server
from tests.e2e.sizes import MESH_SIZES, flags_of

NUM_REQUESTS = 20
NUM_TOKENS = 4
FLAGS = (
    "--mesh=2x2",
    "--api-server-count=2",
    "--forbid-compile",
    *flags_of(MESH_SIZES),
)


@pytest.mark.slow
def test_two_engines_of_two_devices(tmp_path):
    prompts = [p for p in GOLDENS["prompts"] if len(p["prompt_ids"]) <= 40]
    assert len(prompts) >= 8
    with live_server(tmp_path / "log", *FLAGS) as server:

        def complete(number: int) -> tuple[str, str]:
            golden = prompts[number % len(prompts)]
            body = {"model": MODEL, "prompt": golden["prompt_ids"], "max_tokens": NUM_TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == golden["output_ids"][:NUM_TOKENS], golden
            return answer["id"], json.dumps(answer["usage"])

        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(complete, range(NUM_REQUESTS)))
        assert len({answer_id for answer_id, _ in answers}) == NUM_REQUESTS
        assert server.metric("request_success_total") == NUM_REQUESTS
        assert server.metric("generation_tokens_total") == NUM_REQUESTS * NUM_TOKENS
        assert server.metric("compiles_after_ready_total") == 0
        shares = Counter[str]()
        for line in server.get("/metrics")[1].decode().splitlines():
            if line.startswith("jaxserve:engine_requests_total{"):
                shares[line.partition("engine=")[2][:3]] += float(line.rsplit(" ", 1)[1])
        assert sum(shares.values()) == NUM_REQUESTS
        assert min(shares.values()) >= 0.8 * max(shares.values()), shares
