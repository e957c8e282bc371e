"""Grouped and quantized matmuls compile for every chip; which of them write out their weights."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import COMPILED_CHIPS
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from tests.compile.compilers import Compilers, Program, Refused

_SIZE = (2048, 4096)
_BLOCK = 128
_GROUPS = 16


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matmul of bfloat16 tokens."""

    chip: str
    dtype: str
    num_tokens: int = 64
    has_blocks: bool = False
    quantize_x: bool = False

    def __str__(self) -> str:
        blocks = "-blocks" * self.has_blocks + "-a8" * self.quantize_x
        return f"{self.chip}-{self.dtype}-{self.num_tokens}tokens{blocks}"

    def program(self) -> Program:
        width, channels = _SIZE
        num_blocks = width // _BLOCK if self.has_blocks else 1
        weight = QuantizedWeight(
            jax.ShapeDtypeStruct(_SIZE, self.dtype),
            jax.ShapeDtypeStruct((num_blocks, channels), jnp.float32),
        )

        def matmul(x: Any, weight: QuantizedWeight) -> Any:
            chip = COMPILED_CHIPS[self.chip]
            return quantized_matmul(x, weight, chip=chip, quantize_x=self.quantize_x)

        return Program(matmul, (jax.ShapeDtypeStruct((self.num_tokens, width), "bfloat16"), weight))


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A grouped matmul of bfloat16 tokens, an expert's weights being an eighth of _SIZE."""

    chip: str
    dtype: str
    num_tokens: int = 256

    def __str__(self) -> str:
        return f"{self.chip}-{self.dtype}-{self.num_tokens}tokens"

    def program(self) -> Program:
        width, channels = _SIZE[0] // 2, _SIZE[1] // 4
        scales = None
        if self.dtype != "bfloat16":
            scales = jax.ShapeDtypeStruct((_GROUPS, channels), jnp.float32)

        def matmul(*args: Any) -> Any:
            return grouped_matmul(*args, chip=COMPILED_CHIPS[self.chip])

        weights = jax.ShapeDtypeStruct((_GROUPS, width, channels), self.dtype)
        x = jax.ShapeDtypeStruct((self.num_tokens, width), "bfloat16")
        sizes = jax.ShapeDtypeStruct((_GROUPS,), jnp.int32)
        return Program(matmul, (x, weights, sizes, scales))


# What XLA writes out in bfloat16 before it multiplies: float8 where the card has no such type, and
# on all cards blocks of scales where there are many tokens.
def _is_written_out(cell: Quantized) -> bool:
    chip = COMPILED_CHIPS[cell.chip]
    if chip.platform != "gpu":
        return False
    is_unknown = cell.dtype == "float8_e4m3fn" and chip.capability < (8, 9)
    return is_unknown or (cell.has_blocks and not cell.quantize_x and cell.num_tokens == 512)


def _cells(chip: str) -> list[Quantized | Grouped]:
    return [
        Quantized(chip, "int8"),
        Quantized(chip, "int4"),
        Quantized(chip, "float8_e4m3fn"),
        Quantized(chip, "int8", 512),
        Quantized(chip, "int8", quantize_x=True),
        Quantized(chip, "int8", 16, has_blocks=True),
        Quantized(chip, "int8", 512, has_blocks=True),
        Quantized(chip, "int4", has_blocks=True, quantize_x=True),
        Grouped(chip, "bfloat16"),
        Grouped(chip, "int8"),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_fast = metafunc.config.getoption("fast", default=False)
    chips = ("v6e", "h100") if is_fast else COMPILED_CHIPS
    kind = Grouped if "grouped" in metafunc.function.__name__ else Quantized
    cells = [cell for chip in chips for cell in _cells(chip) if isinstance(cell, kind)]
    metafunc.parametrize("jobs", [(cell,) for cell in cells], ids=map(str, cells))


def test_quantized(compilers: Compilers, table: list[str], jobs: tuple[Quantized]) -> None:
    (cell,) = jobs
    result = compilers.submit(cell).result()
    assert not isinstance(result, Refused), result.words
    table.append(f"{cell}: {result.temp_bytes} B temporary")
    size = math.prod(_SIZE)
    if _is_written_out(cell):
        assert result.temp_bytes >= 2 * size
    else:  # parts of a product that is cut in some, and no weight
        assert result.temp_bytes < size


def test_grouped(compilers: Compilers, table: list[str], jobs: tuple[Grouped]) -> None:
    (cell,) = jobs
    result = compilers.submit(cell).result()
    assert not isinstance(result, Refused), result.words
    table.append(f"{cell}: {result.temp_bytes} B temporary")
    size = _GROUPS * math.prod(_SIZE) // 8
    # On TPUs XLA's own kernel; on GPUs every token, or zeros, with every group, fused or not.
    is_kernel = "tpu_custom_call" in result.hlo
    assert is_kernel == (COMPILED_CHIPS[cell.chip].platform == "tpu")
    if (cell.chip, cell.dtype) == ("tpu7x", "int8"):  # which its units do not multiply
        assert result.temp_bytes >= 4 * size
    elif is_kernel:  # tokens, and no weight
        assert result.temp_bytes < size // 4
