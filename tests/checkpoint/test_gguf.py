"""The GGUF container: what was written is read; what is damaged is refused in two lines."""

import struct
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from jaxserve.checkpoint.gguf import GGUFFile
from jaxserve.errors import UserError
from tests.checkpoint.gguf_files import write_gguf

SCALARS = {
    "UINT8": 200,
    "INT8": -100,
    "UINT16": 60000,
    "INT16": -30000,
    "UINT32": 2**32 - 1,
    "INT32": -(2**31),
    "FLOAT32": 0.25,
    "BOOL": True,
    "UINT64": 2**64 - 1,
    "INT64": -(2**63),
    "FLOAT64": 1e300,
}
METADATA = {"a.text": "snowman ☃", "a.list": ["x", "", "日本"], "a.numbers": [1, 2, 3]}
TENSORS = {
    "matrix": np.arange(64 * 6, dtype=np.float32).reshape(6, 64),
    "vector": np.arange(5, dtype=np.float32),
}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", METADATA, TENSORS)


def assert_two_lines(error: UserError, *parts: str) -> None:
    assert len(str(error).splitlines()) == 2
    assert all(part in error.problem for part in parts), error.problem


def test_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = GGUFWriter(path, "llama")
    for name, value in SCALARS.items():
        writer.add_key_value(name, value, GGUFValueType[name])
        if name != "BOOL":
            writer.add_key_value(f"{name}s", [value, 0], GGUFValueType.ARRAY, GGUFValueType[name])
    writer.add_key_value("nested", [[1, 2], [3]], GGUFValueType.ARRAY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata = GGUFFile(path).metadata
    for name, value in SCALARS.items():
        assert metadata[name] == value
        if name != "BOOL":
            assert metadata[f"{name}s"] == [value, 0]
    assert metadata["nested"] == [[1, 2], [3]]


def test_metadata_and_tensors(small_file: Path) -> None:
    file = GGUFFile(small_file)
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    assert file.tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert file.tensors[name].shape == value.shape
        assert file.tensors[name].type == GGMLQuantizationType.F32
        np.testing.assert_array_equal(
            file.read_bytes(name).view(np.float32).reshape(value.shape), value
        )


def test_other_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name, value in TENSORS.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(path).read_bytes("vector").view(np.float32)[0]
    np.testing.assert_array_equal(got, TENSORS["vector"])


def test_truncated_anywhere(small_file: Path) -> None:
    data = small_file.read_bytes()
    last = GGUFFile(small_file).tensors["vector"]
    end = last.offset + last.num_bytes
    cut_file = small_file.with_name("cut.gguf")
    for size in [*range(1, end, 7), end - 1]:
        cut_file.write_bytes(data[:size])
        with pytest.raises(UserError) as caught:
            GGUFFile(cut_file)
        assert_two_lines(caught.value, str(cut_file))
    cut_file.write_bytes(data[:end])  # only padding is gone
    GGUFFile(cut_file)


def test_truncated_tensor_is_named(small_file: Path) -> None:
    data = small_file.read_bytes()
    offset = GGUFFile(small_file).tensors["vector"].offset
    small_file.write_bytes(data[: offset + 4])
    with pytest.raises(UserError, match="truncated or damaged: tensor vector ends at byte"):
        GGUFFile(small_file)


@hypothesis.settings(max_examples=200, deadline=None, database=None)
@hypothesis.given(st.data())
def test_damaged_header_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No damage leads to another exception than UserError, nor to endless reading."""
    path = tmp_path_factory.mktemp("damage") / "x.gguf"
    content = bytearray(write_gguf(path, METADATA, TENSORS).read_bytes())
    end = content.index(b"vector") + 40
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        GGUFFile(path)
    except UserError as e:
        assert_two_lines(e, str(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"PK\3\4" + bytes(100), "is not a GGUF file: it starts with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated or damaged"),
    ],
)
def test_no_gguf_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        GGUFFile(path)
    assert_two_lines(caught.value, str(path), problem)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", 8, 10) + b"short",
        struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 9) + b"b",
        struct.pack("<IIQ", 9, 4, 3) + bytes(8),
        struct.pack("<I", 77) + bytes(8),
    ],
)
def test_last_value_is_cut(tmp_path: Path, value: bytes) -> None:
    """Nothing follows it whose absence would be noticed instead."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + value)
    with pytest.raises(UserError, match="truncated or damaged"):
        GGUFFile(path)


def header_with_tensors(*tensors: tuple[str, list[int], int]) -> bytes:
    """A file without metadata whose tensors (name, dimensions, type number) all lie at 0."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    for name, dims, kind in tensors:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        out += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, 0)
    return out + bytes(4096)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([("w", [32], 999)], "tensor w has the unknown type number 999"),
        ([("w", [32], 0), ("w", [32], 0)], "two tensors have the same name"),
        ([("w", [33], 2)], "tensor w of type Q4_0 has the shape"),
        ([("w", [1, 1, 1, 1, 1], 0)], "tensor w has 5 dimensions"),
        ([("w", [2**40, 2**40], 0)], "tensor w ends at byte"),
    ],
)
def test_bad_tensor_directory(tmp_path: Path, tensors: list, problem: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header_with_tensors(*tensors))
    with pytest.raises(UserError) as caught:
        GGUFFile(path)
    assert_two_lines(caught.value, str(path), problem)
