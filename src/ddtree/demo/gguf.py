"""A reader for GGUF files, as far as the demo's target needs one.

The ``gguf`` package reads every kind of file; this needs three tensor types and no further dependency, and the tests
compare it with that package.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32  # weights that share one scale, in the quantised types


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored."""

    shape: tuple[int, ...]  # row-major; the file lists the fastest dimension first
    kind: int
    offset_bytes: int  # from the start of the tensor data


class GgufFile:
    """``metadata`` (key to value) and ``tensors`` (name to :class:`TensorInfo`) of a little-endian GGUF version 3."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"broken GGUF header: {error}") from error

    def _read_header(self) -> None:
        magic, version = self._take("4sI")
        if magic != b"GGUF" or version != 3:
            raise ValueError("not a GGUF file of version 3")
        tensor_count, metadata_count = self._take("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            self.metadata[key] = self._value(*self._take("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = self._string()
            (dimension_count,) = self._take("I")
            dimensions = self._take(f"{dimension_count}Q")
            kind, offset_bytes = self._take("IQ")
            self.tensors[name] = TensorInfo(tuple(reversed(dimensions)), kind, offset_bytes)
        alignment = self.metadata.get("general.alignment", 32)
        self._tensor_data_start = -(-self._position // alignment) * alignment

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The named tensor, dequantised."""
        info = self.tensors[name]
        count = math.prod(info.shape)
        if info.kind == _F32:
            return self._array("<f4", count, info).reshape(info.shape)
        if info.kind == _Q4_1:  # scale, minimum, 16 bytes: low halves are weights 0-15, high halves 16-31
            blocks = self._blocks(count, 20, info)
            scale, minimum, packed = _half(blocks[:, 0:2]), _half(blocks[:, 2:4]), blocks[:, 4:]
            steps = np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
            return (scale * steps + minimum).reshape(info.shape)
        if info.kind == _Q8_0:  # scale, 32 signed bytes
            blocks = self._blocks(count, 34, info)
            steps = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
            return (_half(blocks[:, 0:2]) * steps).reshape(info.shape)
        raise ValueError(f"tensor {name} has GGUF type {info.kind}, which this reader does not know")

    def _array(self, dtype: str, count: int, info: TensorInfo) -> NDArray[Any]:
        return np.frombuffer(self._data, dtype, count, self._tensor_data_start + info.offset_bytes)

    def _blocks(self, count: int, block_bytes: int, info: TensorInfo) -> NDArray[np.uint8]:
        blocks = count // _BLOCK
        return self._array("u1", blocks * block_bytes, info).reshape(blocks, block_bytes)

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._position)
        self._position += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        (text,) = self._take(f"{length}s")
        return str(text, "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._take("IQ")
            if item_kind in _SCALAR_CODES:
                return list(self._take(f"{length}{_SCALAR_CODES[item_kind]}"))
            return [self._value(item_kind) for _ in range(length)]
        return self._take(_SCALAR_CODES[kind])[0]


def _half(column: NDArray[np.uint8]) -> NDArray[np.float32]:
    return column.copy().view("<f2").astype(np.float32)
