"""Compiles programs for chips in processes of their own, several at a time.

A compiler that aborts, hangs or prints takes down, holds up or speaks for one program only.
"""

import dataclasses
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import jax

    from pallas_kernels.chips import Chip

_NUM_PROCESSES = 2
_LIMIT_S = 600
_NUM_LAST_WORDS = 2000


class Program(NamedTuple):
    """A function, jitted where it donates, and the shapes to compile it for."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def compile(self, chip: "Chip") -> "jax.stages.Compiled":
        """Compiled for one device of `chip`."""
        from pallas_kernels.aot import compile_for

        return compile_for(chip, self.fn, *self.args)


class Compilable(Protocol):
    """A `Program`, or another that knows how to compile itself."""

    def compile(self, chip: "Chip") -> "jax.stages.Compiled": ...


class Job(Protocol):
    """What makes a program, in the process that compiles it; picklable and hashable."""

    @property
    def chip(self) -> str:
        """Name of the chip to compile for."""
        ...

    def program(self) -> Compilable:
        """The program."""
        ...


class PtxasFigures(NamedTuple):
    """What ptxas says of one kernel of Mosaic GPU."""

    registers: int
    spilled_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made."""

    hlo: str
    temp_bytes: int
    alias_bytes: int
    argument_bytes: int
    output_bytes: int
    kernels: tuple[PtxasFigures, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refused:
    """The compiler's words, or those of what stands before it."""

    words: str


class Compilers:
    """Processes that compile, started when first used; close them at the end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES)
        self._own = threading.local()
        self._children: list[_Child] = []
        self._results: dict[Job, Future[Compiled | Refused]] = {}

    def submit(self, job: Job) -> Future[Compiled | Refused]:
        """Compiles the job's program when a process is free; each job once."""
        if job not in self._results:
            self._results[job] = self._threads.submit(self._compile, job)
        return self._results[job]

    def close(self) -> None:
        """Drops what was not begun and ends the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.end()

    def _compile(self, job: Job) -> Compiled | Refused:
        child = getattr(self._own, "child", None)
        if child is not None and not child.takes(job):
            child.end()
        if child is None or not child.is_alive():
            child = self._own.child = _Child()
            self._children.append(child)
        return child.compile(job)


class _Child:
    """A process that compiles for TPUs and for GPUs of one compute capability.

    Mosaic GPU has ptxas compile for the first GPU that a process compiled for.
    """

    def __init__(self) -> None:
        self._capability: tuple[int, int] | None = None
        context = multiprocessing.get_context("spawn")
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by end)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._output.name), daemon=True
        )
        self._process.start()
        theirs.close()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def takes(self, job: Job) -> bool:
        return _capability(job) in (None, self._capability) or self._capability is None

    def compile(self, job: Job) -> Compiled | Refused:
        self._capability = self._capability or _capability(job)
        self._pipe.send(job)
        try:
            if self._pipe.poll(_LIMIT_S):
                return self._pipe.recv()
            problem = f"not compiled after {_LIMIT_S} s"
        except EOFError:
            problem = "the compiler died"
        last_words = Path(self._output.name).read_text(errors="replace")[-_NUM_LAST_WORDS:]
        self.end()
        return Refused(f"{problem}; its last words: {last_words}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._output.close()


def _capability(job: Job) -> tuple[int, int] | None:
    """Of the GPU that is compiled for."""
    from pallas_kernels.chips import CHIPS

    chip = CHIPS[job.chip]
    return chip.capability if chip.platform == "gpu" else None


def by_capability(jobs: Iterable[Job]) -> list[Job]:
    """The order in which fewest processes are started."""
    return sorted(jobs, key=lambda job: _capability(job) or (0, 0))


def _serve(jobs: Connection, output: str) -> None:
    """The life of a process that compiles; all that it prints goes to the file `output`."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # read when a kernel is compiled
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # every compile is a real one
    with open(output, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    while True:
        begin = os.path.getsize(output)
        try:
            job = jobs.recv()
        except EOFError:
            return
        result = _compile(job)
        if isinstance(result, Compiled):
            said = Path(output).read_text(errors="replace")[begin:]
            result = dataclasses.replace(result, kernels=ptxas_figures(said))
        jobs.send(result)


def _compile(job: Job) -> Compiled | Refused:
    from pallas_kernels.chips import CHIPS

    try:
        compiled = job.program().compile(CHIPS[job.chip])
    except Exception as error:  # compilers and what stands before them raise what they like
        return Refused(f"{type(error).__name__}: {error}")
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return Compiled(
        compiled.as_text(),
        analysis.temp_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
    )


def ptxas_figures(said: str) -> tuple[PtxasFigures, ...]:
    """The figures of every kernel in what ptxas printed with -v."""
    spills = re.findall(
        r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n", said
    )
    registers = re.findall(r"Used (\d+) registers", said)
    return tuple(
        PtxasFigures(int(count), int(stored) + int(loaded))
        for count, (stored, loaded) in zip(registers, spills, strict=True)
    )
