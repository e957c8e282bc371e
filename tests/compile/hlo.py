"""What compiled programs do, read from their HLO."""

import collections
import functools
import math
import re
from typing import NamedTuple

import jax

_COPIES = ("copy", "copy-start", "transpose", "convert", "pad", "concatenate")
_FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+|\(.*?\)) ([\w-]+)\(", re.MULTILINE)
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
    "send",
)
_CALLED = re.compile(
    r"(?:to_apply|calls|true_computation|false_computation)=%([\w.-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_SHAPE = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array."""
    return math.prod(shape.shape) * shape.dtype.itemsize


def copies(text: str, smallest: int) -> list[str]:
    """Instructions that make arrays of `smallest` bytes or more anew from others."""
    return [
        match[0].strip()
        for match in _INSTRUCTION.finditer(text)
        if match[3] in _COPIES and largest(match[2]) >= smallest
    ]


class Collective(NamedTuple):
    """An instruction that moves data between devices.

    shape: of its result, without how it lies in memory.
    num_devices: that exchange with each other.
    times: how often it runs in one run of the program, if every conditional takes all its branches.
    source: the operation in JAX, if known.
    """

    name: str
    shape: str
    num_devices: int
    times: int
    source: str

    @property
    def num_bytes(self) -> int:
        """Of its result, all arrays of it."""
        return sum(_sizes(self.shape))

    @property
    def dims(self) -> list[list[int]]:
        """Of each array of its result, without those that are 1."""
        return _dims(self.shape)

    @property
    def link_bytes(self) -> float:
        """What each device sends in one run of the program, if its devices stand in a ring."""
        return self.times * ring_bytes(self.name, self.num_bytes, self.num_devices)


def ring_bytes(name: str, num_bytes: int, num_devices: int) -> float:
    """What each device of a ring sends for a collective with a result of `num_bytes`: an all-reduce
    is a reduce-scatter and an all-gather, and these pass on every part but one."""
    others = num_devices - 1
    if name == "all-reduce":
        return 2 * num_bytes * others / num_devices
    if name in ("all-gather", "all-to-all"):
        return num_bytes * others / num_devices
    return num_bytes * others if name == "reduce-scatter" else num_bytes


def collectives(text: str) -> list[Collective]:
    """All of them, in no order. What a loop runs is there once, and counted.

    Raises:
        ValueError: one is in a loop of which the program does not say how often it turns.
    """
    bodies = _computations(text)
    parts = re.search(r"num_partitions=(\d+)", text)
    num_devices = int(parts[1]) if parts else 1
    entry = re.search(r"^ENTRY %([\w.-]+)", text, re.MULTILINE)
    assert entry is not None, "no program"
    times: collections.Counter[tuple[str, str]] = collections.Counter()  # computation, line

    @functools.cache
    def has_any(name: str) -> bool:
        lines = bodies[name]
        return any(map(_collective, lines)) or any(has_any(n) for x in lines for n in _callees(x))

    def run(name: str, count: int) -> None:
        for line in bodies[name]:
            if _collective(line) is not None:
                times[name, line] += count
            for callee in filter(has_any, _callees(line)):
                run(callee, count * (_num_turns(line, bodies) if " while(" in line else 1))

    run(entry[1], 1)
    found = []
    for (name, line), count in times.items():
        kind, instruction = _collective(line) or ("", "")
        source = re.search(r'op_name="([^"]*)"', line)
        done = next((x for x in bodies[name] if f"-done(%{instruction})" in x), line)
        match = _INSTRUCTION.match(done)
        assert match is not None, done
        shape = re.sub(r"\{[^{}]*\}|/\*[^*]*\*/", "", match[2])
        group = _group_len(line, num_devices)
        found.append(Collective(kind, shape, group, count, source[1] if source else ""))
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation of a program."""
    found = re.finditer(r"^(?:ENTRY )?%([\w.-]+) \(.*\{\n((?:.*\n)*?)\}", text, re.MULTILINE)
    return {match[1]: match[2].splitlines() for match in found}


def _collective(line: str) -> tuple[str, str] | None:
    """Name of the collective that an instruction is or starts, and of the instruction."""
    match = _INSTRUCTION.match(line)
    name = match[3].removesuffix("-start") if match else ""
    return (name, match[1]) if match and name in _COLLECTIVES else None


def _callees(line: str) -> list[str]:
    """Computations that an instruction runs; the body of a loop."""
    match = _INSTRUCTION.match(line)
    if match is None or match[3].endswith(("-done", "-update")):
        return []
    body = re.findall(r"body=%([\w.-]+)", line)
    called = [one or several for one, several in _CALLED.findall(line)]
    return body + [name.strip(" %") for names in called for name in names.split(",")]


def _num_turns(line: str, bodies: dict[str, list[str]]) -> int:
    """Turns of a loop: what it says itself, else the number that its counter is compared with."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%([\w.-]+)", line)
    lines = "\n".join(bodies[condition[1]] if condition else [])
    limits = re.findall(r" = s32\[\]\S* constant\((\d+)\)", lines)
    if len(limits) != 1 or lines.count("direction=LT") != 1:
        raise ValueError(f"how often does this loop turn? {line}\n{lines}")
    return int(limits[0])


def _group_len(line: str, num_devices: int) -> int:
    """Devices in each group of a collective; all, where none is named."""
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if axes:
        lengths = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        used = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes[2])  # some are cut in two
        return math.prod(int(part or lengths[axis]) for axis, part in used)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if counted:
        return int(counted[1])
    return len(listed[1].split(",")) if listed else num_devices


class Kernel(NamedTuple):
    """An instruction that runs something on the device. shape: of its result, as HLO writes it."""

    name: str
    shape: str

    @property
    def is_of_integers(self) -> bool:
        """Whether it makes an array, of more than one number, of integers or truth values. Bytes
        are a library's scratch, or a cache."""
        return any(
            dtype[0] in "psu" and dtype not in ("s8", "u8") and dims and dims != "1"
            for dtype, _, dims in _SHAPE.findall(self.shape)
        )

    @property
    def dims(self) -> list[list[int]]:
        """Of each array that it makes, without those that are 1."""
        return _dims(self.shape)


def kernels_of_loops(text: str) -> list[Kernel]:
    """What runs in each turn of the program's loops. An asynchronous one counts once."""
    found = []
    for body in re.findall(r" while\(.*, body=%([\w.-]+)", text):
        start = text.index(f"\n%{body} (")
        for match in _INSTRUCTION.finditer(text, start, text.index("\n}", start)):
            if match[3] not in _FREE and not match[3].endswith("-done"):
                found.append(Kernel(match[1], match[2]))
    return found


def largest(shape: str) -> int:
    """Bytes of the largest array in a shape as HLO writes it."""
    return max(_sizes(shape), default=0)


def _sizes(shape: str) -> list[int]:
    """Bytes of each array."""
    return [
        math.prod(int(dim) for dim in dims.split(",") if dim) * int(bits or 8) // 8
        for _, bits, dims in _SHAPE.findall(shape)
    ]


def _dims(shape: str) -> list[list[int]]:
    return [
        [int(dim) for dim in dims.split(",") if dim not in ("", "1")]
        for _, _, dims in _SHAPE.findall(shape)
    ]
