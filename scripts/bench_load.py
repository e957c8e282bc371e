#!/usr/bin/env python3
"""Loads an OpenAI-compatible server with five workloads; prints JSON.

    .venv/bin/python scripts/bench_load.py --port 8000 [--model NAME] [--workloads W1,W5] [--run 1]

W1  one stream: a prompt of 64 tokens, 128 out, 5 times
W2  32 requests, 8 at once: prompts of 32 to 512 tokens, 32 to 128 out
W3  a prompt of 1,800 tokens, 16 out, 3 times
W4  16 requests, 4 at once: 1,024 tokens that all begin with, 32 of their own, 16 out
W5  64 requests, 32 at once: prompts of 128 tokens, 64 out
P50, P80  arrivals at random (Poisson) at 50 and 80 % of the rate that W5 reached, for 60 s: as W5

Greedy, and no output ends early (ignore_eos). Prompts are text of words that are one token each,
and differ from run to run, so that no cache helps but in W4. The client is one thread with sockets
of its own making, as it has the server's cores.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from which
or had an they you were their one all we can her has there been if more when will would who so
no she other its may these what them than some him time into only could new then do any my now
such like our over man me even most made after also did many before must through back years
where much your way well down should because each just those people how too little state good
very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used
take three water light earth tree river stone paper music number letter summer winter morning
evening garden
""".split()  # noqa: SIM905 (a list would take a line a word)
_TIMEOUT_S = 600.0
_POISSON_S = 60.0


@dataclasses.dataclass
class Answer:
    """What became of a request; times in seconds since it was due.

    token_s: of every event with text.  num_tokens: as the server counts them.
    """

    num_wanted: int
    token_s: list[float]
    num_tokens: int
    num_cached: int

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclasses.dataclass(frozen=True)
class Client:
    """Sends streamed completions to one server."""

    port: int
    model: str
    fields: dict[str, object]

    async def events(self, prompt: str, num_tokens: int) -> AsyncGenerator[dict]:
        """The events of a completion, as they come.

        Raises:
          RuntimeError: the answer is no stream.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}} | self.fields
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
            async for line in reader:  # chunk sizes and headers are lines of no interest
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])
        finally:
            writer.close()

    async def complete(self, prompt: str, num_tokens: int) -> Answer:
        """Raises RuntimeError if the answer is no stream of tokens."""
        began_s = time.perf_counter()
        answer = Answer(num_tokens, [], 0, 0)
        async for event in self.events(prompt, num_tokens):
            if any(choice.get("text") for choice in event.get("choices", ())):
                answer.token_s.append(time.perf_counter() - began_s)
            if usage := event.get("usage"):
                answer.num_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                answer.num_cached = details.get("cached_tokens") or 0
        if not answer.token_s or not answer.num_tokens:
            raise RuntimeError("a stream without tokens or without a count of them")
        return answer

    async def several(self, jobs: list[tuple[str, int]], concurrency: int) -> list[Answer]:
        """So many at once, in order."""
        waiting = list(enumerate(jobs))[::-1]
        answers: dict[int, Answer] = {}

        async def work() -> None:
            while waiting:
                number, job = waiting.pop()
                answers[number] = await asyncio.wait_for(self.complete(*job), _TIMEOUT_S)

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return [answers[number] for number in range(len(jobs))]

    async def arriving(
        self, make_job: Callable[[], tuple[str, int]], rate: float, rng: random.Random
    ) -> list[Answer]:
        """Requests that come at random, `rate` a second, whatever has become of the others."""
        tasks, due_s, began_s = [], 0.0, time.perf_counter()
        while (due_s := due_s + rng.expovariate(rate)) < _POISSON_S:
            await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - began_s)))
            tasks.append(asyncio.create_task(self.complete(*make_job())))
        return list(await asyncio.gather(*tasks))


def words_of_one_token() -> list[str]:
    """In the vocabulary of the demo model, with a space before them."""
    from jaxserve import checkpoint

    tokenizer = checkpoint.load_tokenizer(checkpoint.resolve_model("smollm2-135m"))

    def is_one_token(word: str) -> bool:
        return len(tokenizer.encode(" " + word, add_special_tokens=False)) == 1

    words = [word for word in dict.fromkeys(_WORDS) if is_one_token(word)]
    assert len(words) > 80, len(words)
    return words


async def run_workload(client: Client, name: str, run: int, results: dict[str, dict]) -> dict:
    """Figures of one workload; `results` are those of workloads before it."""
    rng, words = random.Random(f"{run}/{name}"), words_of_one_token()

    def prompt(num_tokens: int) -> str:
        return "".join(" " + rng.choice(words) for _ in range(num_tokens))

    began_s = time.perf_counter()
    if name == "W1":
        answers = [await client.complete(prompt(64), 128) for _ in range(5)]
    elif name == "W2":
        jobs = [(prompt(rng.randint(32, 512)), rng.randint(32, 128)) for _ in range(32)]
        answers = await client.several(jobs, 8)
    elif name == "W3":
        answers = [await client.complete(prompt(1800), 16) for _ in range(3)]
    elif name == "W4":
        shared = prompt(1024)
        answers = await client.several([(shared + prompt(32), 16) for _ in range(16)], 4)
    elif name == "W5":
        answers = await client.several([(prompt(128), 64) for _ in range(64)], 32)
    elif name in ("P50", "P80"):
        rate = results["W5"]["output_tokens_per_s"] / 64 * int(name[1:]) / 100
        answers = await client.arriving(lambda: (prompt(128), 64), rate, rng)
    elif name == "warm-up":
        jobs = [(prompt(rng.randint(32, 512)), 8) for _ in range(8)]
        answers = await client.several(jobs, 8) + [await client.complete(prompt(64), 16)]
    else:
        raise SystemExit(f"bench_load: there is no workload {name!r}")
    return _figures(answers, time.perf_counter() - began_s)


def _figures(answers: list[Answer], wall_s: float) -> dict:
    first_s = [answer.token_s[0] for answer in answers]
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    decoding = [
        (answer.num_tokens - 1) / (answer.token_s[-1] - answer.token_s[0])
        for answer in answers
        if answer.token_s[-1] > answer.token_s[0]
    ]
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": num_tokens / wall_s,
        "decode_tokens_per_s": statistics.median(decoding),
        "first_token_p50_ms": 1e3 * _quantile(first_s, 0.5),
        "first_token_p99_ms": 1e3 * _quantile(first_s, 0.99),
        "gap_p50_ms": 1e3 * _quantile(gaps_s, 0.5),
        "gap_p99_ms": 1e3 * _quantile(gaps_s, 0.99),
        "num_cached_tokens": sum(answer.num_cached for answer in answers),
        "num_short": sum(answer.num_tokens < answer.num_wanted for answer in answers),
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


async def run_workloads(client: Client, names: list[str], run: int) -> dict[str, dict]:
    """Figures by workload; a line of each goes to standard error."""
    results: dict[str, dict] = {}
    await run_workload(client, "warm-up", run, results)
    for name in names:
        results[name] = await run_workload(client, name, run, results)
        figures = {key: round(value, 2) for key, value in results[name].items()}
        print(f"{name} {json.dumps(figures)}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="smollm2-135m", help="as the server calls it")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--run", type=int, default=1, help="which prompts")
    parser.add_argument("--fields", type=json.loads, default={"ignore_eos": True})
    args = parser.parse_args()
    client = Client(args.port, args.model, args.fields)
    results = asyncio.run(run_workloads(client, args.workloads.split(","), args.run))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
