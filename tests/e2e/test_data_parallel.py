"""Several API servers and engine cores in front of workers without a model: who gets what, who
says what, and what falls with whom. (`test_data_parallel_model.py` has a real one.)"""

import contextlib
import http.client
import json
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.live_server import MODEL, LiveServer, live_server, wait_gone
from tests.e2e.test_failure import left_behind
from tests.fakes import fake_output

FAKE = {"module": "tests.e2e.fake_workers"}


def roles(server: LiveServer) -> Counter[str]:
    """How many processes there are of each kind, by what they run."""
    kinds = ("core_process", "worker_process", "api_process", "coordinator_process")
    found: Counter[str] = Counter()
    for process in server.family():
        line = " ".join(process.cmdline())
        found[next((kind for kind in kinds if f".{kind} " in line), "serve")] += 1
    return found


@pytest.mark.parametrize(
    ("flags", "workers", "engines", "api_servers"),
    [
        ("--mesh 1x4 --workers-per-host 4", 4, 1, 1),
        ("--mesh 1x2 --workers-per-host 2 --data-parallel-size 4 --api-server-count 4", 8, 4, 4),
    ],
)
def test_the_process_table(tmp_path, flags, workers, engines, api_servers):
    before = left_behind()
    with live_server(tmp_path / "log", *flags.split(), **FAKE) as server:
        family = server.family()
        wanted = {
            "serve": 1,
            "api_process": api_servers - 1,
            "core_process": engines,
            "coordinator_process": int(engines > 1),
            "worker_process": workers,
        }
        assert roles(server) == Counter(wanted)
        assert len(family) == api_servers + engines + workers + (engines > 1)
        assert busiest_cpu_s(family, over_s=2) < 0.02  # all are idle
        server.process.send_signal(signal.SIGTERM)
        assert wait_gone(server, family, 5) == 0, server.log
        assert "Traceback" not in server.log
    assert left_behind() <= before


def busiest_cpu_s(family: list[psutil.Process], over_s: float) -> float:
    """CPU seconds of the busiest process, in the quietest of three times."""

    def used() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in family]

    most = []
    for _ in range(3):
        before = used()
        time.sleep(over_s)
        most.append(max(b - a for a, b in zip(before, used(), strict=True)))
    return min(most)


DP = ("--mesh=1x2", "--data-parallel-size=2", "--api-server-count=2")


def test_two_hundred_requests_over_two_engines(tmp_path):
    """Conversations whose turns share their beginning: none lost or doubled, both engine cores as
    busy, and a turn where the one before it was."""
    rng = random.Random(1)
    histories = [[rng.randrange(3, 1000) for _ in range(40)] for _ in range(40)]
    with live_server(tmp_path / "log", *DP, **FAKE) as server:
        lock = threading.Lock()
        cached: list[bool] = []

        def converse(history: list[int]) -> None:
            known = 0
            for turn in range(5):
                num_tokens = 5 + (len(cached) + turn) % 7
                body = {"model": MODEL, "prompt": history, "max_tokens": num_tokens}
                body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
                status, answer = server.post("/v1/completions", body)
                assert status == 200, answer
                output = answer["choices"][0]["token_ids"]
                assert output == fake_output(history, num_tokens), answer
                if turn:
                    details = answer["usage"]["prompt_tokens_details"]
                    with lock:
                        cached.append(details["cached_tokens"] >= known)
                known = len(history) // 16 * 16
                history = [*history, *output, *range(16)]

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(converse, histories))
        assert len(cached) == 160 and sum(cached) >= 0.9 * len(cached), Counter(cached)
        for _ in range(8):  # whichever API server is asked, it knows of all
            assert server.metric("request_success_total") == 200
        page = server.get("/metrics")[1].decode()
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith("jaxserve:engine_requests_total{")
        ]
        assert len(counts) == 2 and sum(counts) == 200
        assert min(counts) >= 0.8 * max(counts), counts
        assert server.metric("num_requests_running") == 0
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.post("/reset_prefix_cache", {})[0] == 200


@contextlib.contextmanager
def connections(server: LiveServer, count: int):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(server.connect(30))) for _ in range(count)]


def start_streams(links: list[http.client.HTTPConnection]) -> list[http.client.HTTPResponse]:
    """Long streams, each after its first chunk."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    responses = []
    for link in links:
        link.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
        responses.append(link.getresponse())
        assert responses[-1].readline().startswith(b"data: ")
    return responses


def last_event(response: http.client.HTTPResponse) -> dict:
    return json.loads(response.read().decode().strip().split("\n\n")[-1].removeprefix("data: "))


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("core_process", r"engine core \d was killed by signal 9"),
        ("worker_process", r"worker \d.0 was killed by signal 9"),
    ],
)
def test_what_falls_together(tmp_path, victim, words):
    """One server is one thing: every request fails with the reason, and all processes end."""
    before = left_behind()
    with live_server(tmp_path / "log", *DP, **FAKE) as server, connections(server, 8) as links:
        family = server.family()
        streams = start_streams(links)
        next(p for p in family if f".{victim} " in " ".join(p.cmdline())).kill()
        for stream in streams:
            assert re.search(words, last_event(stream)["error"]["message"])
        status, health = server.get("/health")
        assert status == 503 and re.search(words, health.decode())
        status, page = server.get("/metrics")  # of one that can ask nobody any more
        assert status == 503 and re.search(words, page.decode())
        assert wait_gone(server, family, 10) == 1, server.log
        assert re.search(words, server.log.strip().splitlines()[-1])
        assert "Traceback" not in server.log
    assert left_behind() <= before


def test_an_api_server_that_dies_ends_the_others(tmp_path):
    """Its own requests have nobody left to answer them."""
    before = left_behind()
    with live_server(tmp_path / "log", *DP, **FAKE) as server:
        family = server.family()
        next(p for p in family if ".api_process " in " ".join(p.cmdline())).kill()
        assert wait_gone(server, family, 10) == 1, server.log
        assert "API server 1 was killed by signal 9" in server.log.strip().splitlines()[-1]
    assert left_behind() <= before


def test_servers_of_their_own_fall_alone(tmp_path):
    """Replicas behind a gateway: one engine core each, nothing shared."""
    with (
        live_server(tmp_path / "one", **FAKE) as one,
        live_server(tmp_path / "other", **FAKE) as other,
        connections(one, 1) as ones,
        connections(other, 1) as others,
    ):
        (stream,) = start_streams(ones)
        (kept,) = start_streams(others)
        next(p for p in one.family() if ".core_process " in " ".join(p.cmdline())).kill()
        assert "engine core was killed" in last_event(stream)["error"]["message"]
        assert one.process.wait(10) == 1
        assert kept.readline() is not None and other.get("/health")[0] == 200
        body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 3, "return_token_ids": True}
        status, answer = other.post("/v1/completions", body | {"temperature": 0})
        assert status == 200
        assert answer["choices"][0]["token_ids"] == fake_output([5, 6], 3)


def test_all_api_servers_share_the_port(tmp_path):
    """Each of many connections is served, and not all by the same one."""
    with (
        live_server(tmp_path / "log", "--api-server-count", "3", **FAKE) as server,
        connections(server, 24) as links,
    ):
        streams = start_streams(links)
        servers = [p for p in server.family() if is_api_server(p)]
        held = [sum(c.status == "ESTABLISHED" for c in p.net_connections("tcp")) for p in servers]
        assert sum(held) == len(streams) == 24
        assert sum(n > 0 for n in held) > 1, held


def is_api_server(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())
    return ".api_process " in line or " serve " in line
