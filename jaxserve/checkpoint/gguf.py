"""The GGUF container: metadata and tensor directory, parsed from a memory map.

Format: the GGUF specification of the ggml project, versions 2 and 3, little endian.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """Where a tensor lies. shape: outermost dimension first; offset: from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file: `metadata` by key (strings as str, arrays as lists) and `tensors` by name.

    Raises:
      UserError: not a GGUF file, a version or tensor type that is unknown, truncated or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self._map = _map_file(path)
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as e:
            raise self._damaged("its header ends early or is damaged") from e
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > len(self._map):
                raise self._damaged(
                    f"tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes:,} of "
                    f"{len(self._map):,}"
                )

    def read_bytes(self, name: str) -> np.ndarray:
        """The tensor's stored bytes as a read-only uint8 view [rows, bytes a row] of the file."""
        tensor = self.tensors[name]
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        flat = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(rows, -1)

    def _damaged(self, what: str) -> UserError:
        return UserError(
            f"Model file {self.path} is truncated or damaged: {what}.",
            fix="Download the file again and compare its size or checksum with the source's.",
        )

    def _parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        cursor = _Cursor(self._map)
        if cursor.take(4) != _MAGIC:
            raise UserError(
                f"Model file {self.path} is not a GGUF file: it starts with {self._map[:4]!r}.",
                fix="Give a .gguf file, or a directory with config.json and *.safetensors.",
            )
        version = cursor.unpack(_U32)
        if version not in _VERSIONS:
            raise UserError(
                f"Model file {self.path} has GGUF version {version}; versions 2 and 3 (little "
                "endian) are supported.",
                fix="Convert the model again with a current converter.",
            )
        num_tensors, num_keys = cursor.unpack(_U64), cursor.unpack(_U64)
        metadata = {}
        for _ in range(num_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.unpack(_U32))
        raw = [self._tensor_header(cursor) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT)) or _DEFAULT_ALIGNMENT
        start = -(-cursor.position // alignment) * alignment
        tensors = {t.name: t._replace(offset=t.offset + start) for t in raw}
        if len(tensors) < num_tensors:
            raise self._damaged("two tensors have the same name")
        return metadata, tensors

    def _tensor_header(self, cursor: "_Cursor") -> TensorInfo:
        name = cursor.string()
        num_dims = cursor.unpack(_U32)
        if num_dims > _MAX_DIMS:
            raise self._damaged(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([cursor.unpack(_U64) for _ in range(num_dims)]))
        type_id, offset = cursor.unpack(_U32), cursor.unpack(_U64)
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise UserError(
                f"Model file {self.path}: tensor {name} has the unknown type number {type_id}.",
                fix="Use a file with types F32, F16, BF16, Q8_0, Q4_0, Q4_1 or Q2_K to Q6_K.",
            ) from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_values = int(np.prod([1, *shape], dtype=object))
        if not shape or shape[-1] % block_size:
            raise self._damaged(f"tensor {name} of type {kind.name} has the shape {shape}")
        return TensorInfo(name, shape, kind, offset, num_values // block_size * block_bytes)


class _Cursor:
    """Reads values one after the other; an IndexError or struct.error where the data ends."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise IndexError(end)
        out = self._data[self.position : end]
        self.position = end
        return out

    def unpack(self, kind: struct.Struct) -> Any:
        (out,) = kind.unpack_from(self._data, self.position)
        self.position += kind.size
        return out

    def string(self) -> str:
        return self.take(self.unpack(_U64)).decode()

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.unpack(_scalar(type_id))
        element, count = self.unpack(_U32), self.unpack(_U64)
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        size = _scalar(element).size
        return list(struct.unpack(f"<{count}{_SCALARS[element]}", self.take(size * count)))

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has 10^5 of them: one flat loop.
        data, position, end = self._data, self.position, len(self._data)
        unpack: Callable = _U64.unpack_from
        out = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise IndexError(position)
            out.append(data[start:position].decode())
        self.position = position
        return out


def _scalar(type_id: int) -> struct.Struct:
    if type_id not in _SCALARS:
        raise IndexError(f"value type {type_id}")
    return struct.Struct("<" + _SCALARS[type_id])


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as e:
        raise UserError(f"Model file {path} is empty.", fix="Download the file again.") from e
    except OSError as e:
        raise UserError(
            f"Model file {path} cannot be read: {e.strerror}.",
            fix="Check that the file exists and that you may read it.",
        ) from e
