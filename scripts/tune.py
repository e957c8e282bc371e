"""Finds block sizes for a chip and writes pallas_kernels/ragged_paged_attention/tuned/<chip>.json.

On a TPU or a GPU it measures:

    python scripts/tune.py

Where there is none it ranks TPU sizes by the compiler's schedule (see tpu_schedule.py): by the
modelled time of a call with even rows and of one with ragged rows, then by spilled registers, then
by cycles. Shapes that are not tuned anew keep their
entries:

    scripts/with_compilers scripts/tune.py --chip v6e --case "Llama-3-8B, decode"
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpu_programs import CASES, CORES, Case, Program, execute, schedules
from tpu_schedule import Modelled

from pallas_kernels.chips import CHIPS, Chip, chip_of
from pallas_kernels.ragged_paged_attention import AttentionCall, KVCacheLayout
from pallas_kernels.tuning import Sizes, forced_sizes

OP = Path(__file__).parent.parent / "pallas_kernels" / "ragged_paged_attention"
_REPEATS = 20
_GPU_PAGE_SIZE = 64  # the engine's there
_CALLS = 10  # in a program, so that starting one is not what is measured


class Ranked(NamedTuple):
    """Sizes and what they were ranked by, less is better; figures: for people."""

    sizes: Sizes
    cost: tuple[float, ...]
    figures: Mapping[str, float]


def candidates(kernel: str, case: Case) -> list[Sizes]:
    """Sizes worth a try."""
    if kernel == "tpu_decode":
        token_bytes = case.token_bytes // 2
        return [
            {"pages_per_block": pages, "num_buffers": 4, "chunk": chunk}
            for pages, chunk in itertools.product((2, 4, 8, 16, 32), (256,))
            if 2**18 <= pages * case.page_size * token_bytes <= 2**22
            and pages * case.page_size % chunk == 0
        ]
    return [
        {"num_queries": queries, "num_keys": keys}
        for queries, keys in itertools.product((128, 256, 512), (256, 512, 1024))
        if keys % case.page_size == 0
    ]


def gpu_candidates(chip: Chip, case: Case) -> list[Sizes]:
    """Sizes of GPU decode that differ, once what does not fit is cut off."""
    from pallas_kernels.ragged_paged_attention import gpu_decode

    call = attention_call(chip, case)
    tried = itertools.product((32, 64, 128), (1, 2, 3), (2, 3, 4, 6))
    found = dict.fromkeys(gpu_decode.fit(call, *sizes) for sizes in tried)
    names = ("tokens", "per_core", "stages")
    return [{name: getattr(sizes, name) for name in names} for sizes in found if sizes]


def kernel_of(case: Case, platform: str) -> str:
    """The kernel that does a case's work."""
    return f"{platform}_{'decode' if case.q_len == 1 else 'prefill'}"


def attention_call(chip: Chip, case: Case) -> AttentionCall:
    """A case as kernels see it."""
    layout = KVCacheLayout.for_platform(
        chip.platform, 1, case.num_kv_heads, case.head_dim, case.dtype, case.page_size
    )
    return AttentionCall(layout, chip, case.num_heads, layout.dtype)


def rank(
    tried: Iterable[Sizes], evaluate: Callable[[Sizes], Ranked | None], report: Callable[[str], Any]
) -> list[Ranked]:
    """Best first; without those that `evaluate` finds impossible."""
    found = []
    for sizes in tried:
        ranked = evaluate(sizes)
        figures = "does not compile" if ranked is None else dict(ranked.figures)
        report(f"{dict(sizes)}: {figures}")
        if ranked is not None:
            found.append(ranked)
    return sorted(found, key=lambda ranked: ranked.cost)


def by_schedule(chip: Chip, case: Case, kernel: str) -> Callable[[Sizes], Ranked | None]:
    """Ranks by the schedule of the kernel alone, for the case and for one of ragged rows."""
    lens = (None, ragged_lens(case))

    def evaluate(sizes: Sizes) -> Ranked | None:
        try:
            kernels = schedules(chip, case, Program(kernel, {kernel: sizes})).values()
        except RuntimeError:
            return None
        even, ragged = (
            Modelled(chip, case, [execute(chip, case, bundles, rows) for bundles in kernels])
            for rows in lens
        )
        spills = sum(loop.fills + loop.spills for loop in even.loops)
        figures = {
            "modelled_us": round(even.modelled_s * 1e6, 1),
            "cycles": even.cycles,
            "modelled_us_ragged": round(ragged.modelled_s * 1e6, 1),
            "cycles_ragged": ragged.cycles,
            "fills_and_spills": spills,
        }
        seconds, cycles = even.modelled_s + ragged.modelled_s, even.cycles + ragged.cycles
        return Ranked(sizes, (seconds, spills, cycles), figures)

    return evaluate


def ragged_lens(case: Case) -> list[int]:
    """Rows of every length up to the case's, evenly spread, so that no block size fits all."""
    rows = case.num_rows
    return [max(case.q_len, case.kv_len * (r + 1) // rows) for r in range(rows)]


def by_measuring(chip: Chip, case: Case, kernel: str) -> Callable[[Sizes], Ranked | None]:
    """Ranks by the time of the whole op on the device that is here."""
    import jax

    def evaluate(sizes: Sizes) -> Ranked | None:
        with forced_sizes({kernel: sizes}):
            try:
                seconds = measure(chip, case, chip.platform)
            except jax.errors.JaxRuntimeError:
                return None
        return Ranked(sizes, (seconds,), {"measured_us": round(seconds * 1e6, 1)})

    return evaluate


def measure(chip: Chip, case: Case, implementation: str = "auto") -> float:
    """Median seconds of a call in a program of some, after a run that compiles."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.ragged_paged_attention import plan_attention, ragged_paged_attention
    from pallas_kernels.ragged_paged_attention.layout import zeros

    attention = attention_call(chip, case)
    layout = attention.layout
    pages_per_row = -(-case.kv_len // case.page_size)
    tables = 1 + jnp.arange(case.num_rows * pages_per_row, dtype=jnp.int32)
    kv_cache = zeros(layout, case.num_rows * pages_per_row + 1)
    q = jnp.ones((case.num_tokens, case.num_heads, case.head_dim), layout.dtype)
    new = jnp.ones((case.num_tokens, case.num_kv_heads, case.head_dim), layout.dtype)
    rows = (
        tables.reshape(case.num_rows, pages_per_row),
        jnp.full(case.num_rows, case.kv_len, jnp.int32),
        case.q_len * jnp.arange(case.num_rows + 1, dtype=jnp.int32),
        jnp.int32(case.num_rows),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def run(kv_cache: Any, q: Any, new: Any, *rows: Any) -> Any:
        size = (case.num_tokens, layout.num_pages(kv_cache))
        plan = plan_attention(attention, *size, *rows, implementation=implementation)

        def call(_: Any, state: Any) -> Any:
            kv_cache, q = state
            out, kv_cache = ragged_paged_attention(
                *(q, new, new, kv_cache, jnp.int32(0), *rows),
                layout=layout,
                chip=chip,
                scale=case.head_dim**-0.5,
                implementation=implementation,
                plan=plan,
            )
            return kv_cache, out

        return jax.lax.fori_loop(0, _CALLS, call, (kv_cache, q))

    seconds = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        kv_cache, out = run(kv_cache, q, new, *rows)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(seconds[1:])


def write(path: Path, ranked_by: str, entries: Mapping[tuple[str, AttentionCall], Ranked]) -> None:
    """Puts entries into a file, each in the place of one for the same kernel and shape."""
    old = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.is_file() else []
    by_key = {json.dumps([entry["kernel"], entry["shape"]]): entry for entry in old}
    for (kernel, call), ranked in entries.items():
        shape = call.tuning_shape._asdict()
        by_key[json.dumps([kernel, shape])] = {
            "kernel": kernel,
            "shape": shape,
            "sizes": dict(ranked.sizes),
            "ranked_by": ranked_by,
            "figures": dict(ranked.figures),
        }
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"entries": list(by_key.values())}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    """Returns the exit code: 1 where nothing compiled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chip", choices=CORES, help="rank by the schedule for this TPU")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    arguments = parser.parse_args()
    if arguments.chip:
        chip, how = CHIPS[arguments.chip], by_schedule
        ranked_by = (
            "libtpu's schedule, even and ragged rows: max(compute, DMA) time, spills, cycles"
        )
    else:
        import jax

        device = jax.devices()[0]
        capability = str(getattr(device, "compute_capability", ""))
        chip, how = chip_of(device.platform, device.device_kind, capability), by_measuring
        ranked_by = f"median time of {_REPEATS} runs of {_CALLS} calls on a {device.device_kind}"
        if chip.platform == "cpu":
            parser.error(f"{chip.name} has no kernels whose sizes are tuned: use --chip")
    path = OP / "tuned" / f"{chip.name}.json"
    code = 0
    for name in arguments.case or CASES:
        case = CASES[name]
        kernel = kernel_of(case, chip.platform)
        if chip.platform == "gpu":
            if kernel == "gpu_prefill":  # its sizes are what registers hold
                continue
            case = dataclasses.replace(case, page_size=_GPU_PAGE_SIZE)
        print(f"{chip.name}, {name}, {kernel}", flush=True)
        ranked = rank(
            gpu_candidates(chip, case) if chip.platform == "gpu" else candidates(kernel, case),
            how(chip, case, kernel),
            lambda line: print(f"  {line}", flush=True),
        )
        if ranked:
            write(path, ranked_by, {(kernel, attention_call(chip, case)): ranked[0]})
            print(f"  best: {dict(ranked[0].sizes)}", flush=True)
        else:
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
