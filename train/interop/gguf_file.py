"""GGUF files: metadata and (quantised) tensors in one file, as llama.cpp writes them.

Tensors are memory-mapped and dequantised one at a time. Layouts follow the format's own
description (ggml's gguf.md) and the block structures of ggml-common.h.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...errors import CheckpointError

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
LONGEST = 1 << 28  # of a string or array: more is damage


class Kind(NamedTuple):
    """A type of tensor.

    Attributes:
        name: as the format calls it.
        values: in a block.
        nbytes: of a block.
        decode: uint8 (blocks, nbytes) -> float32 (blocks, values).
    """

    name: str
    values: int
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 (blocks 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """Low halves of the bytes, then high halves."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Eight groups of 32 with 6-bit scales and minima."""
    packed = blocks[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scale, minimum = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
    return (scale[..., None] * quants - minimum[..., None]).reshape(-1, 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Sixteen groups of 16 with 8-bit scales; 4 bits of a value here, 2 bits there."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    quants = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return (_half(blocks, 208) * scale)[..., None].repeat(16, axis=2).reshape(-1, 256) * (
        quants.reshape(-1, 256)
    )


KINDS = {
    0: Kind("F32", 1, 4, lambda b: np.ascontiguousarray(b).view(np.float32)),
    1: Kind("F16", 1, 2, lambda b: np.ascontiguousarray(b).view(np.float16)),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    12: Kind("Q4_K", 256, 144, _q4_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
    30: Kind("BF16", 1, 2, lambda b: np.ascontiguousarray(b).view(ml_dtypes.bfloat16)),
}


class Tensor(NamedTuple):
    """Where a tensor is and what it is; the shape is NumPy's, outermost first."""

    kind: Kind
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.kind.values * self.kind.nbytes


class GGUFFile:
    """An open file.

    Attributes:
        path: of the file.
        metadata: key -> value.
        tensors: name -> where it is.
    """

    def __init__(self, path: Path):
        """Reads the header and checks that every tensor is inside the file.

        Raises:
            CheckpointError: missing, no GGUF file, truncated, or with an unknown type of tensor.
        """
        self.path = path
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except ValueError:
            raise CheckpointError(f"{path}: is empty") from None
        self._at = 4
        if bytes(self._data[:4]) != b"GGUF":
            raise CheckpointError(f"{path}: is no GGUF file")
        try:
            version = self._scalar("I")
            if version not in (2, 3):
                raise CheckpointError(f"{path}: GGUF version {version}; want 2 or 3")
            count, entries = self._scalar("Q"), self._scalar("Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(entries):
                key = self._string()
                self.metadata[key] = self._value(self._scalar("I"))
            heads = [self._tensor_head() for _ in range(count)]
        except (struct.error, UnicodeDecodeError, ValueError):
            raise CheckpointError(f"{path}: is truncated or damaged in its header") from None
        align = int(self.metadata.get("general.alignment", 32))
        first = -(-self._at // align) * align
        self.tensors: dict[str, Tensor] = {}
        for name, kind, shape, offset in heads:
            if kind not in KINDS:
                known = ", ".join(one.name for one in KINDS.values())
                raise CheckpointError(f"{path}: tensor {name} is of type {kind}; want {known}")
            tensor = Tensor(KINDS[kind], shape, first + offset)
            if tensor.begin + tensor.nbytes > self._data.size:
                raise CheckpointError(f"{path}: is truncated: tensor {name} ends beyond the file")
            self.tensors[name] = tensor

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, dequantised: float32, or float16 and bfloat16 as they are."""
        kind, shape, begin = self.tensors[name]
        data = self._data[begin : begin + self.tensors[name].nbytes].reshape(-1, kind.nbytes)
        return kind.decode(data).reshape(shape)

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        data = self._data[self._at : self._at + size].tobytes()
        self._at += size
        return struct.unpack(f"<{code}", data)[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        if length > min(LONGEST, self._data.size - self._at):
            raise ValueError
        data = self._data[self._at : self._at + length].tobytes()
        self._at += length
        return data.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise ValueError
            return self._scalar(SCALARS[kind])
        inner, length = self._scalar("I"), self._scalar("Q")
        if length > min(LONGEST, self._data.size - self._at):
            raise ValueError
        return [self._value(inner) for _ in range(length)]

    def _tensor_head(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return name, self._scalar("I"), tuple(reversed(dims)), self._scalar("Q")
