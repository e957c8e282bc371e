"""What compiled programs do, read from their HLO."""

import math
import re
from typing import NamedTuple

import jax

_COPIES = ("copy", "copy-start", "transpose", "convert", "pad", "concatenate")
_FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+|\(.*?\)) ([\w-]+)\(", re.MULTILINE)
_COLLECTIVE = re.compile(
    r"^.* = (\S+|\(.*?\)) "
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?:-start)?\(.*$",
    re.MULTILINE,
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
    """An instruction that moves data between devices. source: the operation in JAX, if known."""

    name: str
    num_bytes: int
    source: str


def collectives(text: str) -> list[Collective]:
    """All of them; a loop's count once."""
    found = []
    for match in re.finditer(_COLLECTIVE, text):
        source = re.search(r'op_name="([^"]*)"', match[0])
        size = largest(match[1])
        found.append(Collective(match[2], size, source[1] if source else ""))
    return found


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
        return [
            [int(dim) for dim in dims.split(",") if dim not in ("", "1")]
            for _, _, dims in _SHAPE.findall(self.shape)
        ]


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
    sizes = [
        math.prod(int(dim) for dim in dims.split(",") if dim) * int(bits or 8) // 8
        for _, bits, dims in _SHAPE.findall(shape)
    ]
    return max(sizes, default=0)
