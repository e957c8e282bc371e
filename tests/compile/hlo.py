"""What compiled programs do, read from their HLO."""

import math
import re

import jax

_COPIES = ("copy", "copy-start", "transpose", "convert", "pad", "concatenate")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+|\(.*?\)) ([\w-]+)\(", re.MULTILINE)
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


def largest(shape: str) -> int:
    """Bytes of the largest array in a shape as HLO writes it."""
    sizes = [
        math.prod(int(dim) for dim in dims.split(",") if dim) * int(bits or 8) // 8
        for _, bits, dims in _SHAPE.findall(shape)
    ]
    return max(sizes, default=0)
