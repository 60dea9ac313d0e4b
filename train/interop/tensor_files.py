"""Safetensors files, read by memory map and written tensor by tensor.

The format is eight bytes with the length of a JSON header, the header (name -> dtype, shape, byte
range), and the bytes. Nothing in it can run code. Reading checks every range against the file
before any tensor is touched, so that a file cut short is named at once.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ...errors import CheckpointError

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes, as in the reference implementation
INDEX_SUFFIX = ".index.json"


class Spec(NamedTuple):
    """What a tensor is.

    Attributes:
        dtype: of NumPy.
        shape: of the array.
    """

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        """Such as `float32[3, 4]`."""
        return f"{self.dtype.name}{list(self.shape)}"


class TensorFile:
    """One file, memory-mapped: arrays are views that cost memory only where they are read.

    Attributes:
        path: of the file.
        specs: name -> what the tensor is.
        metadata: the header's strings.
    """

    def __init__(self, path: Path):
        """Reads and checks the header.

        Raises:
            CheckpointError: missing, no safetensors file, or shorter than its header says.
        """
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(LARGEST_HEADER, size - 8):
                    raise CheckpointError(f"{path}: is truncated or no safetensors file")
                header = json.loads(file.read(length))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except ValueError:
            raise CheckpointError(f"{path}: is damaged or no safetensors file") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{path}: is damaged or no safetensors file")
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.specs: dict[str, Spec] = {}
        self._begins: dict[str, int] = {}
        for name, entry in header.items():
            self._add(name, entry, begin=8 + length, size=size)
        self._map = np.memmap(path, np.uint8, "r") if size else np.zeros((0,), np.uint8)

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, as a view of the file."""
        spec, begin = self.specs[name], self._begins[name]
        return self._map[begin : begin + spec.nbytes].view(spec.dtype).reshape(spec.shape)

    def _add(self, name: str, entry: Any, *, begin: int, size: int) -> None:
        try:
            dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            first, last = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.path}: tensor {name} has a damaged header") from None
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: tensor {name} is {dtype}; want one of {known}")
        spec = Spec(np.dtype(DTYPES[dtype]), shape)
        if last - first != spec.nbytes or first < 0:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {spec} but has {last - first} bytes: damaged"
            )
        if begin + last > size:
            raise CheckpointError(
                f"{self.path}: is truncated: tensor {name} ends at byte {begin + last}, the file "
                f"at {size}"
            )
        self.specs[name] = spec
        self._begins[name] = begin + first


class Tensors(Protocol):
    """A checkpoint's tensors by their published names, whatever they are stored in.

    Attributes:
        path: of the checkpoint.
        specs: name -> what the tensor is.
    """

    path: Path
    specs: dict[str, Spec]

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor."""
        ...

    def file_of(self, name: str) -> Path:
        """Where a tensor is, for messages."""
        ...


class TensorFolder:
    """The tensors of a checkpoint, whatever files they are spread over.

    Attributes:
        path: the folder.
        specs: name -> what the tensor is.
    """

    def __init__(self, path: Path, stem: str = "model"):
        """Opens `STEM.safetensors`, or the shards that `STEM.safetensors.index.json` lists.

        Raises:
            CheckpointError: there are none, one is missing or damaged, or they are pickles.
        """
        self.path = path
        single, index = path / f"{stem}.safetensors", path / f"{stem}.safetensors{INDEX_SUFFIX}"
        if index.exists():
            where = _read_index(index)
        elif single.exists():
            where = None
        else:
            pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt*"))
            reason = f"holds no {single.name}"
            if pickled:
                reason += (
                    f" but {pickled[0].name}, a pickle, which may run code; convert it with "
                    "save_pretrained(safe_serialization=True)"
                )
            raise CheckpointError(f"{path}: {reason}")
        names = [single.name] if where is None else sorted(set(where.values()))
        files = {name: TensorFile(path / name) for name in names}
        self._files: dict[str, TensorFile] = {}
        self.specs: dict[str, Spec] = {}
        for file_name, file in files.items():
            for name, spec in file.specs.items():
                if where is not None and where.get(name) != file_name:
                    raise CheckpointError(
                        f"{index}: does not say that tensor {name} is in {file_name}"
                    )
                self._files[name], self.specs[name] = file, spec
        for name, file_name in ({} if where is None else where).items():
            if name not in self.specs:
                raise CheckpointError(f"{path / file_name}: lacks tensor {name} of {index.name}")

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, as a view of its file."""
        return self._files[name][name]

    def file_of(self, name: str) -> Path:
        """Where a tensor is, for messages."""
        return self._files[name].path


class RenamedTensors:
    """Tensors whose names end differently in their files.

    Attributes:
        path: of the checkpoint.
        specs: new name -> what the tensor is.
    """

    def __init__(self, tensors: Tensors, endings: Mapping[str, str]):
        """Takes the tensors and {ending in the file: ending to be known by}."""
        self._tensors, self.path = tensors, tensors.path
        self._theirs: dict[str, str] = {}
        for name in tensors.specs:
            old = next((ending for ending in endings if name.endswith(ending)), None)
            new = name if old is None else name.removesuffix(old) + endings[old]
            self._theirs[new] = name
        self.specs = {new: tensors.specs[name] for new, name in self._theirs.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor."""
        return self._tensors[self._theirs[name]]

    def file_of(self, name: str) -> Path:
        """Where a tensor is, for messages."""
        return self._tensors.file_of(self._theirs[name])


class TensorWriter:
    """Writes a file whose tensors are known beforehand, in any order, each as soon as it is there.

    The file appears under its name when everything is in it.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], *, metadata_room: int = 0):
        """Lays the file out.

        Args:
            path: of the file.
            specs: name -> what the tensor will be.
            metadata_room: bytes to keep free in the header for what `close` is given.
        """
        self._path, self._specs = path, dict(specs)
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        begin, self._entries = 0, {}
        for name, spec in self._specs.items():
            self._entries[name] = {
                "dtype": NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, begin + spec.nbytes],
            }
            begin += spec.nbytes
        length = len(json.dumps(self._entries).encode()) + metadata_room + 64
        self._header_bytes = -(-(8 + length) // 64) * 64 - 8  # tensors begin at a multiple of 64
        self._missing = set(self._specs)
        try:
            self._file = self._temporary.open("w+b")
            self._file.truncate(8 + self._header_bytes + begin)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None

    def __enter__(self) -> "TensorWriter":
        """Returns the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Deletes what is unfinished."""
        if not self._file.closed:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes one tensor.

        Raises:
            CheckpointError: the disk is full.
        """
        spec = self._specs[name]
        assert (array.dtype, array.shape) == tuple(spec), (name, array.dtype, array.shape, spec)
        begin = 8 + self._header_bytes + self._entries[name]["data_offsets"][0]
        try:
            self._file.seek(begin)
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from None
        self._missing.discard(name)

    def close(self, metadata: Mapping[str, str]) -> None:
        """Writes the header and gives the file its name.

        Raises:
            CheckpointError: the disk is full.
        """
        assert not self._missing, sorted(self._missing)[:3]
        header = {"__metadata__": dict(metadata), **self._entries}
        text = json.dumps(header, ensure_ascii=True).encode()
        assert len(text) <= self._header_bytes, "metadata_room is too small"
        try:
            self._file.seek(0)
            self._file.write(self._header_bytes.to_bytes(8, "little"))
            self._file.write(text.ljust(self._header_bytes))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self._path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from None


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        where = json.loads(path.read_bytes())["weight_map"]
        bad = [f for f in where.values() if not isinstance(f, str) or Path(f).name != f]
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: is damaged: it has no weight_map") from None
    if bad:
        raise CheckpointError(f"{path}: names the file {bad[0]!r}, want one beside it")
    return dict(where)
