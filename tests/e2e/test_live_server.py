"""A real server under real clients: same tokens, mixed load, disconnects, fuzz, no compile."""

import concurrent.futures
import contextlib
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from jaxserve.messages import SamplingParams
from tests.e2e.engine import GOLDENS
from tests.e2e.live_server import MODEL, LiveServer, live_server
from tests.e2e.sizes import SIZES, flags_of

SHORT = [g for g in GOLDENS["prompts"] if len(g["prompt_ids"]) < 100]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """float32, as the tokens are compared."""
    log = tmp_path_factory.mktemp("live") / "log"
    with live_server(log, *flags_of(SIZES), "--forbid-compile") as running:
        yield running


def complete(server: LiveServer, **fields: object) -> dict:
    status, body = server.post("/v1/completions", {"model": MODEL, **fields})
    assert status == 200, body
    return body


def test_shows_three_processes_that_idle(server):
    family = server.family()
    names = [" ".join(p.cmdline()) for p in family]
    assert len(family) == 3, names
    assert "jaxserve serve" in names[0] and "engine.core_process" in names[1]
    assert "worker.worker_process" in names[2]
    before = [sum(p.cpu_times()[:2]) for p in family]
    time.sleep(10)
    used = [sum(p.cpu_times()[:2]) - b for p, b in zip(family, before, strict=True)]
    assert all(seconds < 0.1 for seconds in used), used  # 1 % of 10 s


def test_greedy_text_over_http_is_the_golden(server, demo_tokenizer):
    golden = next(g for g in SHORT if g["name"] == "english")
    body = complete(server, prompt=golden["text"], max_tokens=64, temperature=0, ignore_eos=True)
    assert body["usage"]["prompt_tokens"] == len(golden["prompt_ids"])
    wanted = demo_tokenizer.decode(golden["output_ids"], skip_special_tokens=True)
    assert body["choices"][0]["text"] == wanted


def test_seeded_text_over_http_is_the_engines(server, make_engine, demo_tokenizer):
    prompt = SHORT[9]["prompt_ids"]
    sampling = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=2**40 + 7)
    tokens = make_engine().generate([prompt], [sampling])[0]
    fields = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 2**40 + 7}
    body = complete(server, prompt=prompt, ignore_eos=True, **fields)
    wanted = demo_tokenizer.decode(tokens, skip_special_tokens=True)
    assert body["choices"][0]["text"] == wanted


def test_streamed_text_adds_up(server):
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a line with an emoji 😀 and 漢字."}],
        "temperature": 0,
        "max_tokens": 20,
    }
    status, whole = server.post("/v1/chat/completions", request)
    assert status == 200
    streamed = request | {"stream": True, "stream_options": {"include_usage": True}}
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(streamed))
        events = connection.getresponse().read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


def random_request(rng: random.Random) -> dict:
    golden = rng.choice(SHORT)
    options = {
        "temperature": lambda: rng.choice([0, 0.3, 1, 2]),
        "top_p": lambda: rng.uniform(0.05, 1),
        "top_k": lambda: rng.choice([-1, 1, 7, 1000]),
        "min_p": lambda: rng.uniform(0, 0.5),
        "seed": lambda: rng.getrandbits(63),
        "min_tokens": lambda: rng.randint(0, 3),
        "stop": lambda: rng.choice(["the", [" of", "\n"], ["never occurs"]]),
        "stop_token_ids": lambda: [rng.randrange(49152) for _ in range(3)],
        "ignore_eos": lambda: rng.random() < 0.5,
        "n": lambda: rng.randint(1, 3),
        "cache_salt": lambda: rng.choice(["a", "b"]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {str(rng.randrange(49152)): rng.uniform(-100, 100)},
        "bad_words": lambda: ["the", "of the"],
        "logprobs": lambda: rng.choice([0, 5]),
        "prompt_logprobs": lambda: rng.choice([0, 3]),
        "structured_outputs": lambda: {"regex": "[a-z ]{1,9}"},
    }
    chosen = rng.sample(list(options), rng.randint(0, 6))
    body = {"model": MODEL, "prompt": golden["prompt_ids"], "max_tokens": rng.randint(3, 12)}
    return body | {name: options[name]() for name in chosen}


def test_200_mixed_requests_compile_nothing(server):
    rng = random.Random(20)
    requests = [random_request(rng) for _ in range(200)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda r: server.post("/v1/completions", r, 300), requests))
    for request, (status, body) in zip(requests, answers, strict=True):
        assert status == 200, (request, body)
        assert len(body["choices"]) == request.get("n", 1)
        for choice in body["choices"]:
            assert choice["finish_reason"] in ("stop", "length")
    assert server.metric("compiles_after_ready_total") == 0
    assert server.get("/health")[0] == 200


def test_a_client_that_leaves_is_dropped_within_a_step(server):
    connection = server.connect()
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    response = connection.getresponse()
    stamps = []
    for _ in range(6):
        assert response.readline().startswith(b"data: ")
        response.readline()
        stamps.append(time.monotonic())
    assert server.metric("num_requests_running") == 1
    response.close()
    connection.close()
    took_s = server.wait_metric("num_requests_running", 0)
    step_s = max(b - a for a, b in pairwise(stamps))
    assert took_s < 1 + 3 * step_s, (took_s, step_s)  # the metric is read over HTTP as well
    assert server.metric("num_requests_waiting") == 0


def test_exact_counters(server):
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    counts = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    names += tuple(f"{name}_count" for name in (*counts, "e2e_request_latency_seconds"))
    before = [server.metric(name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        for _ in range(10):
            pool.submit(complete, server, prompt=[5, 6, 7], max_tokens=10, ignore_eos=True)
    gained = [server.metric(name) - b for name, b in zip(names, before, strict=True)]
    assert gained == [30, 100, 10, 10, 90, 10]


def test_200_long_requests_cancelled_at_once(server):
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 400, "ignore_eos": True})
    connections = [server.connect() for _ in range(200)]
    for connection in connections:
        connection.request("POST", "/v1/completions", body)
    time.sleep(0.5)
    for connection in connections:
        connection.close()
    started_s = time.monotonic()
    complete(server, prompt="Still there?", max_tokens=2, ignore_eos=True)
    assert time.monotonic() - started_s < 5
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_metric(name, 0)


def mutated(rng: random.Random) -> bytes:
    """A valid body with something wrong: a field of another type, a cut, a flipped byte."""
    body = random_request(rng)
    junk = [None, -1, 0, 2**70, 1e308, "", "x", [], {}, [[]], True, [None], {"a": 1}, "\ud800"]
    for _ in range(rng.randint(1, 2)):
        body[rng.choice([*body, "messages", "stream", "logprobs", "best_of"])] = rng.choice(junk)
    data = json.dumps(body).encode()
    kind = rng.randrange(4)
    if kind == 0:
        data = data[: rng.randrange(len(data))]
    elif kind == 1:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


def test_fuzzed_bodies_never_give_a_500(server):
    rng = random.Random(77)
    bodies = [mutated(rng) for _ in range(150)]
    paths = [rng.choice(["/v1/completions", "/v1/chat/completions"]) for _ in bodies]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda path, body: server.post(path, body, 120), paths, bodies)
        for path, body, (status, answer) in zip(paths, bodies, answers, strict=True):
            assert status < 500, (path, body, answer)
            assert status == 200 or answer["error"]["message"], (path, body, answer)
    assert server.get("/health")[0] == 200
    assert (
        complete(server, prompt="Still there?", max_tokens=2, ignore_eos=True)["usage"][
            "completion_tokens"
        ]
        == 2
    )


def test_nothing_is_left_running(server):
    """Runs last: all the above has given back its blocks."""
    server.wait_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert Path("/proc", str(server.process.pid)).exists()
