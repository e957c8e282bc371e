"""Calls of ragged paged attention whose TPU schedules are read; makes libtpu write them."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpu_bundles import Bundles, Execution, count, parse

from pallas_kernels.chips import CHIPS, Chip

# jax's kernel takes no fewer rows than there may be; where fewer are live, the others are padding.
MAX_ROWS = 64


class Core(NamedTuple):
    """A TensorCore, as far as a schedule is read with it.

    flops: of its matrix units, a cycle: 4 of 128 x 128 that take a row a cycle, or 2 of 256 x 256
        that take two. XLA schedules its own products of large matrices that close and no closer.
    unit_width: of a matrix unit.
    delay_slots: see `tpu_bundles.Bundles`.
    """

    flops: int
    unit_width: int
    delay_slots: int


CORES = {
    "v5e": Core(2 * 4 * 128**2, 128, 4),
    "v5p": Core(2 * 4 * 128**2, 128, 4),
    "v6e": Core(2 * 2 * 256**2 * 2, 256, 4),
    "tpu7x": Core(2 * 2 * 256**2 * 2, 256, 6),
}


def clock_hz(chip: Chip) -> float:
    """The clock at which all matrix units together reach the chip's published peak."""
    return chip.matmul_flops / chip.num_cores / CORES[chip.name].flops


@dataclass(frozen=True)
class Case:
    """A call: `num_rows` rows that each have `q_len` new tokens, the last of `kv_len`."""

    num_heads: int
    num_kv_heads: int
    num_rows: int
    q_len: int
    kv_len: int
    head_dim: int = 128
    page_size: int = 128
    dtype: str = "bfloat16"

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.q_len

    @property
    def token_bytes(self) -> int:
        """Of the K and V of a token."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def itemsize(self) -> int:
        return {"bfloat16": 2, "float32": 4}[self.dtype]

    @property
    def bytes_to_read(self) -> int:
        """The live K and V, the new ones, and the queries."""
        queries = self.num_tokens * self.num_heads * self.head_dim * self.itemsize
        return (self.num_rows * self.kv_len) * self.token_bytes + queries

    @property
    def useful_flops(self) -> int:
        """Of both products, of what the causal mask leaves."""
        seen = self.q_len * (2 * self.kv_len - self.q_len + 1) // 2
        return 4 * self.num_rows * seen * self.num_heads * self.head_dim


_SHARES = {"Llama-3-8B": (32, 8), "Qwen3-32B and Llama-3.3-70B, 1x8": (8, 1)}
CASES = {
    f"{share}, {phase}": Case(*heads, *rows)
    for share, heads in _SHARES.items()
    for phase, rows in {"decode": (64, 1, 4096), "prefill": (1, 2048, 4096)}.items()
}


@dataclass(frozen=True)
class Program:
    """What is compiled for a case.

    kernel: "ours", the whole op; one of its kernels, "tpu_decode" or "tpu_prefill"; or "jax", jax's
        ragged paged attention, which has no KV write.
    sizes: block sizes; of ours, kernel -> its sizes, where they are not to be those it would take;
        of jax's, pages and queries of a block.
    """

    kernel: str
    sizes: Mapping[str, Any]


def schedules(chip: Chip, case: Case, program: Program) -> dict[str, Bundles]:
    """Compiles for `chip`; kernel -> its schedule.

    Raises:
        RuntimeError: the compiler refused, in its words.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
        )
        arguments = json.dumps([chip.name, vars(case), program.kernel, dict(program.sizes)])
        child = subprocess.run(
            [sys.executable, __file__, arguments],
            env=os.environ | {"LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise RuntimeError(child.stderr.strip()[-2000:])
        pattern = re.compile(r"\d+-(ragged\w+)(?:\.\d+)?-\d+-packed-bundles-post-ra\.txt")
        found = ((pattern.fullmatch(path.name), path) for path in Path(folder).iterdir())
        return {
            match[1]: parse(path.read_text(), CORES[chip.name].delay_slots)
            for match, path in found
            if match
        }


def execute(
    chip: Chip, case: Case, bundles: Bundles, kv_lens: Sequence[int] | None = None
) -> list[Execution]:
    """What each core of the device executes of one kernel in one call.

    kv_lens: of the rows, where not all are those of the case.
    """
    rows = case.num_rows
    padding = [0] * (MAX_ROWS - rows)
    starts = [case.q_len * r for r in range(rows + 1)]
    known: dict[str, Sequence[int]] = {
        f"s32[{MAX_ROWS}]": [*(kv_lens or [case.kv_len] * rows), *padding],
        f"s32[{MAX_ROWS + 1}]": starts + padding,
        "s32[1]": [rows],  # and the layer: any number does
        "s32[2]": [0, 0],  # where jax's kernel begins
    }
    cores = range(chip.num_cores)
    return [count(bundles, lambda index, shape: known.get(shape), core) for core in cores]


def jax_sizes(chip: Chip, case: Case) -> dict[str, int]:
    """What the table of jax's kernel has for the case's heads and the longest context it knows.

    It is keyed by the most tokens of a step, 512 or more; where it has no entry, it has a fallback.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as table

    generation = {"v5e": 5, "v5p": 5, "v6e": 6, "tpu7x": 7}[chip.name]
    table.get_tpu_version = lambda: generation
    table.get_device_name = lambda num_devices=None: f"TPU v{generation if generation < 7 else 6}"
    num_tokens = max(512, case.num_tokens)
    for max_len in (case.kv_len, case.kv_len // 2, case.kv_len // 4):
        key = (
            *(case.dtype, case.dtype, case.num_heads, case.num_kv_heads, case.head_dim),
            *(case.page_size, num_tokens, max_len // case.page_size),
        )
        if table.simplify_key(key) in table.TUNED_BLOCK_SIZES[table.get_device_name()]:
            break
    pages, queries = table.get_tuned_block_sizes(*key)
    return {"pages": pages, "queries": queries}


def _compile(chip: Chip, case: Case, program: Program) -> None:
    """Compiles in this process, for what libtpu writes while it does."""
    from pallas_kernels.aot import compile_for

    if program.kernel == "jax":
        fn, arguments = _build_jax(chip, case, program.sizes)
    else:
        fn, arguments = _build_ours(chip, case, program)
    compile_for(chip, fn, *arguments)


def _build_ours(chip: Chip, case: Case, program: Program) -> tuple[Any, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.ragged_paged_attention import (
        KVCacheLayout,
        ragged_paged_attention,
        tpu_decode,
        tpu_prefill,
    )
    from pallas_kernels.tuning import forced_sizes

    # One kernel alone: the other one leaves everything as it is.
    others = {"tpu_decode": (tpu_prefill, "prefill"), "tpu_prefill": (tpu_decode, "decode")}
    if program.kernel in others:
        setattr(*others[program.kernel], lambda call, out, kv_cache: (out, kv_cache))

    layout = KVCacheLayout.for_platform(
        "tpu", 2, case.num_kv_heads, case.head_dim, case.dtype, case.page_size
    )

    def call(kv_cache: Any, *arrays: Any) -> Any:
        q, k, v, *rest = arrays
        with forced_sizes(program.sizes):
            return ragged_paged_attention(
                *(q, k, v, kv_cache, *rest),
                layout=layout,
                chip=chip,
                implementation="tpu",
                scale=case.head_dim**-0.5,
            )

    q, lens, tables, starts = _shapes(case)
    new = jax.ShapeDtypeStruct((case.num_tokens, case.num_kv_heads, case.head_dim), q.dtype)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    cache = layout.shape(_num_pages(case))
    arguments = (cache, q, new, new, scalar, tables, lens, starts, scalar)
    return jax.jit(call, donate_argnums=0), arguments


def _build_jax(chip: Chip, case: Case, sizes: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def call(*arrays: Any) -> Any:
        return ragged_paged_attention(
            *arrays,
            sm_scale=case.head_dim**-0.5,
            num_kv_pages_per_block=sizes["pages"],
            num_queries_per_block=sizes["queries"],
            vmem_limit_bytes=chip.core_memory_bytes * 3 // 4,
        )

    q, lens, tables, starts = _shapes(case)
    pages = (_num_pages(case), case.page_size, 2 * case.num_kv_heads, case.head_dim)
    num_rows = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.ShapeDtypeStruct(pages, q.dtype)
    return call, (q, cache, lens, tables, starts, num_rows)


def _shapes(case: Case) -> tuple[Any, Any, Any, Any]:
    """Queries, kv_lens, block tables and cu_q_lens."""
    import jax
    import jax.numpy as jnp

    pages_per_row = -(-case.kv_len // case.page_size)
    q = (case.num_tokens, case.num_heads, case.head_dim)
    return (
        jax.ShapeDtypeStruct(q, jnp.dtype(case.dtype)),
        jax.ShapeDtypeStruct((MAX_ROWS,), jnp.int32),
        jax.ShapeDtypeStruct((MAX_ROWS, pages_per_row), jnp.int32),
        jax.ShapeDtypeStruct((MAX_ROWS + 1,), jnp.int32),
    )


def _num_pages(case: Case) -> int:
    return MAX_ROWS * -(-case.kv_len // case.page_size) + 1


if __name__ == "__main__":
    chip_name, fields, kernel, kernel_sizes = json.loads(sys.argv[1])
    _compile(CHIPS[chip_name], Case(**fields), Program(kernel, kernel_sizes))
