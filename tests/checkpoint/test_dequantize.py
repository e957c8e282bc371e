"""Dequantization equals the gguf package's, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

from jaxserve.checkpoint import dequantize as ours
from jaxserve.errors import UserError

QUANTIZED = ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(kind: GGMLQuantizationType, rows: int, row_len: int) -> np.ndarray:
    """Any bytes are valid blocks: infinite and NaN scales are among them."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (rows, row_len // block_size * block_bytes)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("shape", [(1, 256), (3, 512), (70, 2304)])
@pytest.mark.parametrize("name", [*QUANTIZED, "IQ4_XS"])
def test_equal_to_gguf(name: str, shape: tuple[int, int]) -> None:
    kind = GGMLQuantizationType[name]
    data = random_blocks(kind, *shape)
    got = ours.dequantize(data, kind)
    assert got.dtype == np.float32 == ours.stored_dtype(kind)
    assert got.shape == shape
    np.testing.assert_array_equal(got.view(np.uint32), dequantize(data, kind).view(np.uint32))


def test_more_blocks_than_a_chunk() -> None:
    values = np.random.default_rng(0).normal(size=(300, 576)).astype(np.float32)
    assert values.size // 32 > ours._CHUNK_BLOCKS
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        kind = GGMLQuantizationType[name]
        data = quantize(values, kind)
        np.testing.assert_array_equal(ours.dequantize(data, kind), dequantize(data, kind))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_plain_types_stay_as_they_are(dtype: type) -> None:
    values = np.random.default_rng(0).normal(size=(4, 40)).astype(dtype)
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[np.dtype(dtype).name]
    data = values.view(np.uint8)
    got = ours.dequantize(data, GGMLQuantizationType[kind])
    assert got.dtype == np.dtype(dtype) == ours.stored_dtype(GGMLQuantizationType[kind])
    np.testing.assert_array_equal(got, values)
    assert np.shares_memory(got, data)


def test_unreadable_type() -> None:
    with pytest.raises(UserError, match="GGUF type Q8_1 cannot be read"):
        ours.dequantize(np.zeros((1, 36), np.uint8), GGMLQuantizationType.Q8_1)
