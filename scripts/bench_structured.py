#!/usr/bin/env python3
"""What holding outputs to a grammar costs: output tokens/s beside free text, in one run.

    .venv/bin/python scripts/bench_structured.py [--rounds 3] [--batch 16]

Every side runs the same prompts for the same number of tokens on one engine, in turn. The regex
never forces a token, so it shows the bare price of masks; the schema forces its keys, which are
skipped through.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxserve import LLM, SamplingParams
from jaxserve.grammars import grammar_from_json_schema, grammar_from_regex

OUTPUT_TOKENS = 96
RECORD = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in ("is_open", "has_parking", "is_cheap")},
    "required": ["is_open", "has_parking", "is_cheap"],
    "additionalProperties": False,
}
GRAMMARS = {
    "free": None,
    "regex": grammar_from_regex(r"[A-Za-z ,.]{2000}"),
    "schema": grammar_from_json_schema({"type": "array", "items": RECORD, "minItems": 100}),
}


def tokens_per_s(llm: LLM, grammar: str | None, batch: int, seed: int) -> float:
    """Output tokens/s of a batch whose prompts nothing has cached."""
    prompts = [
        [(seed * 997 + i * 131 + j * 17) % 40000 + 100 for j in range(32)] for i in range(batch)
    ]
    params = SamplingParams(
        grammar=grammar, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=grammar is None
    )
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == OUTPUT_TOKENS for output in outputs)
    return batch * OUTPUT_TOKENS / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    with LLM("smollm2-135m", max_model_len=1024, executor="worker") as llm:
        for round_idx in range(options.rounds + 1):
            order = list(GRAMMARS)[round_idx % 3 :] + list(GRAMMARS)[: round_idx % 3]
            for name in order:
                rate = tokens_per_s(
                    llm, GRAMMARS[name], options.batch, round_idx * 3 + order.index(name)
                )
                if round_idx:  # the first one is not counted
                    rates[name].append(rate)
    free = statistics.median(rates["free"])
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{name:7} {rate:7.1f} tok/s  {rate / free:.3f} of free text")


if __name__ == "__main__":
    main()
