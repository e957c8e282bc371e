"""Models the speed of ragged paged attention on a TPU from the compiler's schedule, beside jax's.

    scripts/with_compilers scripts/tpu_schedule.py --chip v6e --case "Llama-3-8B, decode"

Compiles both for the chip, counts what a call executes (see tpu_bundles.py) and prints it. Bytes
are counted DMA by DMA as the call starts them, not taken from the loops' structure. No TPU is
needed, and nothing was measured on one: stalls are not in the figures.
"""

import argparse
from collections.abc import Iterable, Sequence

from tpu_bundles import Execution, LoopFigures
from tpu_programs import (
    CASES,
    CORES,
    Case,
    Program,
    clock_hz,
    execute,
    jax_sizes,
    schedules,
)

from pallas_kernels.chips import CHIPS, Chip

_DTYPE_BITS = {"f32": 32, "bf16": 16}  # all others: 8


class Modelled:
    """What one call of a program takes on a chip, all of its kernels and cores together."""

    def __init__(self, chip: Chip, case: Case, executions: Sequence[Sequence[Execution]]):
        """executions: of each kernel, those of each core."""
        self._chip = chip
        self._case = case
        self._executions = executions
        self.cycles = sum(max(core.cycles for core in cores) for cores in executions)

    def bytes_moved(self, source: str, target: str) -> int:
        """By all DMAs from one memory to another."""
        return sum(core.bytes_moved(source, target) for cores in self._executions for core in cores)

    @property
    def loops(self) -> list[LoopFigures]:
        """Inner loops that use the matrix units, of one core."""
        return [loop for cores in self._executions for loop in cores[0].product_loops()]

    @property
    def bytes_read(self) -> int:
        return self.bytes_moved("hbm", "vmem")

    @property
    def read_ratio(self) -> float:
        """Bytes read / bytes that must be."""
        return self.bytes_read / self._case.bytes_to_read

    @property
    def compute_s(self) -> float:
        return self.cycles / clock_hz(self._chip)

    @property
    def dma_s(self) -> float:
        """Of all bytes, at the chip's bandwidth."""
        total = self.bytes_read + self.bytes_moved("vmem", "hbm")
        return total / self._chip.hbm_bytes_per_s

    @property
    def modelled_s(self) -> float:
        """Both at once, neither waiting for the other."""
        return max(self.compute_s, self.dma_s)

    @property
    def useful(self) -> float:
        """Products that the call is for / what its cores' matrix units could do in those cycles."""
        core = CORES[self._chip.name]
        return self._case.useful_flops / (self.cycles * core.flops * self._chip.num_cores)

    def busy(self, loop: LoopFigures) -> float:
        """Products issued in a loop / what the matrix units could do in its cycles."""
        core = CORES[self._chip.name]
        rows = sum(
            count * 8 * 32 // _DTYPE_BITS.get(dtype, 8) for dtype, count in loop.products.items()
        )
        return 2 * rows * core.unit_width**2 / (loop.cycles * core.flops)


def model(chip: Chip, case: Case, program: Program) -> Modelled:
    """Compiles and counts; `schedules` says what it raises."""
    kernels = schedules(chip, case, program).values()
    return Modelled(chip, case, [execute(chip, case, bundles) for bundles in kernels])


def rows_of(chip: Chip, case: Case, modelled: Modelled) -> dict[str, str]:
    """Label -> figure, as the table shows them."""
    loops = modelled.loops

    def each(values: Iterable[str]) -> str:
        return " | ".join(values)

    shown = {
        "cycles of the call": f"{modelled.cycles:,}",
        "inner loops: turns": each(f"{loop.turns:,}" for loop in loops),
        "inner loops: cycles a turn": each(f"{loop.cycles / loop.turns:,.0f}" for loop in loops),
        "inner loops: matrix units busy": each(f"{modelled.busy(loop):.0%}" for loop in loops),
        "inner loops: fills, spills a turn": each(
            f"{loop.fills / loop.turns:,.0f}, {loop.spills / loop.turns:,.0f}" for loop in loops
        ),
        "MB read, written": f"{modelled.bytes_read / 1e6:,.1f}, "
        f"{modelled.bytes_moved('vmem', 'hbm') / 1e6:,.1f}",
        "bytes read / must be": f"{modelled.read_ratio:.3f}",
        "us of compute, of DMA": f"{modelled.compute_s * 1e6:,.0f}, {modelled.dma_s * 1e6:,.0f}",
        "bound by": "compute" if modelled.compute_s > modelled.dma_s else "memory",
    }
    if case.q_len > 1:
        return shown | {"useful products / peak": f"{modelled.useful:.0%}"}
    pages = case.num_rows * case.kv_len / case.page_size
    live_s = case.num_rows * case.kv_len * case.token_bytes / chip.hbm_bytes_per_s
    return shown | {
        "cycles a page, of one core": f"{modelled.cycles / pages * chip.num_cores:,.0f}",
        "live KV bytes / bandwidth / time": f"{live_s / modelled.modelled_s:.0%}",
    }


def _print_case(chip: Chip, name: str) -> None:
    case = CASES[name]
    core = CORES[chip.name]
    page_s = case.page_size * case.token_bytes / (chip.hbm_bytes_per_s / chip.num_cores)
    print(f"\n{chip.name}, {name}: {case}")
    print(
        f"clock {clock_hz(chip) / 1e9:.3f} GHz = {chip.matmul_flops:.3g} peak bf16 op/s / "
        f"{chip.num_cores} cores / {core.flops} a cycle; {chip.hbm_bytes_per_s:.3g} B/s: "
        f"the DMAs of a page take {page_s * clock_hz(chip):.0f} cycles"
    )
    sizes = jax_sizes(chip, case)
    titles = ("ours", f"jax's, {sizes['pages']} pages x {sizes['queries']} queries")
    programs = zip(titles, (Program("ours", {}), Program("jax", sizes)), strict=True)
    columns: dict[str, dict[str, str]] = {}
    for title, program in programs:
        try:
            columns[title] = rows_of(chip, case, model(chip, case, program))
        except RuntimeError as error:
            print(f"{title}: not compiled: {error}")
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    widths = [max(len(title), *map(len, column.values())) for title, column in columns.items()]
    label_width = max(map(len, labels))
    titles = [title.rjust(w) for title, w in zip(columns, widths, strict=True)]
    print("  ".join([" " * label_width, *titles]))
    for label in labels:
        cells = [c.get(label, "").rjust(w) for c, w in zip(columns.values(), widths, strict=True)]
        print("  ".join([label.ljust(label_width), *cells]), flush=True)


def main() -> None:
    """Prints the tables of all chosen chips and cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chip", action="append", choices=CORES, help="default: v6e and tpu7x")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    arguments = parser.parse_args()
    for chip in arguments.chip or ("v6e", "tpu7x"):
        for name in arguments.case or CASES:
            _print_case(CHIPS[chip], name)


if __name__ == "__main__":
    main()
