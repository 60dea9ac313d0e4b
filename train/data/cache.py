"""Tokenises once: a folder of memory-mapped arrays, keyed by everything that went into it.

A folder appears under its final name only when it is complete and on disk, so a build that was
killed leaves nothing that could be mistaken for a cache. Processes that need the same folder wait
for the one that builds it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .sources import Source
from .splits import SPLITS, Document
from .store import TokenStore
from .tokenizer import Tokenizer, utf8

FORMAT = "genlab-tokens-1"
META_FILE = "meta.json"
BATCH_CHARACTERS = 1 << 21
_FILES = ("tokens.bin", "offsets.bin", "bytes.bin", "names.json")

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, documents done, documents in all)."""


def default_cache_dir() -> Path:
    """Returns $GENLAB_CACHE, or the platform's cache folder of this user."""
    if chosen := os.environ.get("GENLAB_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "genlab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genlab"


def hash_key(**parts: str) -> str:
    """Returns a folder name (32 hex digits) for the named parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _clear_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left while writing the cache {folder}: free some, or set GENLAB_CACHE "
                "to a folder on another disk"
            ) from None
        raise DataError(
            f"cannot write the cache {folder}: {error.strerror or error}; GENLAB_CACHE names "
            "another folder"
        ) from None


def ensure_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Builds a folder if it does not exist: completely or not at all, and by one process only.

    Args:
        folder: its final path.
        build: fills the empty folder that it is given.

    Raises:
        DataError: the disk is full or not writable.
    """
    if folder.exists():
        return
    with _clear_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return
            # Nobody else can be building: what lies here was left by a killed process.
            for left in folder.parent.glob(f"{folder.name}.tmp-*"):
                shutil.rmtree(left)
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
            try:
                build(temporary)
                for path in temporary.iterdir():
                    _sync(path)
                _sync(temporary)
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _token_dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def token_cache_folder(cache_dir: Path, source: Source, tokenizer: Tokenizer) -> Path:
    """Returns where the tokens of this source under this tokenizer belong."""
    key = hash_key(format=FORMAT, source=source.fingerprint, tokenizer=tokenizer.fingerprint)
    return cache_dir / "tokens" / key


def write_token_cache(
    folder: Path,
    source: Source,
    assignment: NDArray[np.uint8],
    tokenizer: Tokenizer,
    progress: Progress | None,
) -> None:
    """Tokenises all documents into an existing empty folder.

    Args:
        folder: where to write.
        source: the documents.
        assignment: the split of each, as `assign_splits` returned it.
        tokenizer: encodes them.
        progress: told after each batch of documents.

    Raises:
        DataError: the source changed since `assignment` was made.
        OSError: the disk is full (`ensure_folder` words it).
    """
    dtype = _token_dtype(tokenizer.vocab_size)
    lengths: list[list[int]] = [[] for _ in SPLITS]
    byte_counts: list[list[int]] = [[] for _ in SPLITS]
    names: list[list[str]] = [[] for _ in SPLITS]
    done = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{s}.tokens.bin", "wb")) for s in SPLITS]
        for batch in _batches(source.documents()):
            if done + len(batch) > len(assignment):
                break
            encoded = tokenizer.encode_batch([d.text for d in batch])
            for document, ids in zip(batch, encoded, strict=True):
                split = int(assignment[done])
                files[split].write(ids.astype(dtype).tobytes())
                lengths[split].append(len(ids))
                byte_counts[split].append(len(utf8(document.text)))
                names[split].append(document.id)
                done += 1
            if progress:
                progress("tokenise", done, len(assignment))
    if done != len(assignment):
        raise DataError("the source's files changed while they were being read: run again")
    for split, length, count, name in zip(SPLITS, lengths, byte_counts, names, strict=True):
        offsets = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])
        (folder / f"{split}.offsets.bin").write_bytes(offsets.astype("<i8").tobytes())
        (folder / f"{split}.bytes.bin").write_bytes(np.array(count, "<i8").tobytes())
        (folder / f"{split}.names.json").write_text(json.dumps(name), encoding="utf-8")
    meta = {
        "format": FORMAT,
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype,
        "documents": {s: len(length) for s, length in zip(SPLITS, lengths, strict=True)},
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(folder.iterdir())
        },
    }
    (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_token_cache(
    folder: Path, source: Source, tokenizer: Tokenizer
) -> tuple[TokenStore, TokenStore, TokenStore]:
    """Opens the three splits, memory-mapped.

    Raises:
        DataError: a file is missing, truncated or changed, or the cache belongs to another source
            or tokenizer. The message names the folder to delete.
    """

    def refuse(reason: str) -> DataError:
        return DataError(f"token cache {folder}: {reason}; delete this folder to rebuild it")

    try:
        meta = json.loads((folder / META_FILE).read_bytes())
        found = {name: meta[name] for name in ("format", "source", "tokenizer")}
        dtype, files, documents = meta["dtype"], meta["files"], meta["documents"]
        expected_files = {(n, f["bytes"], f["sha256"]) for n, f in files.items()}
    except OSError as error:
        raise refuse(f"{META_FILE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise refuse(f"{META_FILE} is corrupt") from None
    wanted = {
        "format": FORMAT,
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    for name, value in wanted.items():
        if found[name] != value:
            raise refuse(
                f"it was made for another {name} ({str(found[name])[:16]}, wanted {value[:16]})"
            )
    if set(files) != {f"{s}.{f}" for s in SPLITS for f in _FILES}:
        raise refuse(f"{META_FILE} is corrupt: it lists other files than a cache has")
    for name, size, digest in sorted(expected_files):
        path = folder / name
        try:
            got = path.stat().st_size
            if got != size:
                raise refuse(f"{name} is truncated or changed: {got} bytes, wanted {size}")
            if _sha256(path) != digest:
                raise refuse(f"{name} is corrupt: its checksum differs")
        except OSError as error:
            raise refuse(f"{name}: {error.strerror}") from None
    return tuple(  # type: ignore[return-value]
        _open_split(folder, split, dtype, documents[split], tokenizer) for split in SPLITS
    )


def _open_split(
    folder: Path, split: str, dtype: str, documents: int, tokenizer: Tokenizer
) -> TokenStore:
    path = folder / f"{split}.tokens.bin"
    # An empty file cannot be mapped.
    tokens: Any = np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
    offsets = np.fromfile(folder / f"{split}.offsets.bin", "<i8")
    byte_counts = np.fromfile(folder / f"{split}.bytes.bin", "<i8")
    names = tuple(json.loads((folder / f"{split}.names.json").read_bytes()))
    if len(offsets) != documents + 1 or offsets[-1] != len(tokens):
        raise DataError(f"token cache {folder}: {split} index does not fit; delete this folder")
    return TokenStore(np.asarray(tokens), offsets, byte_counts, names, tokenizer.specials, split)
