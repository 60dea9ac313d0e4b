"""Checkpoints: written in the background, complete or absent, checked leaf by leaf when read.

A checkpoint is the folder `checkpoints/STEP`, which Orbax writes under another name and renames
when everything is on disk. It holds every leaf of the `TrainState` under its dotted name, and a
description (`Meta`) with each leaf's shape, dtype and CRC-32. Nothing else is state: randomness,
the batches and the learning rate follow from the step number.
"""

import itertools
import json
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from pydantic import ValidationError

from ..errors import CheckpointError
from ..paradigms.config import Config

FORMAT = "genlab-checkpoint-1"
# What Orbax, TensorStore and JAX raise for files that are missing, cut short or altered.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError)
# What a failed write raises; TensorStore reports a full disk as ValueError or RuntimeError.
UNWRITABLE = (OSError, ValueError, RuntimeError)


class Leaf(Config):
    """What a leaf must be when it is read.

    Attributes:
        shape: of the array.
        dtype: of the array.
        crc32: of its bytes in C order.
    """

    shape: tuple[int, ...]
    dtype: str
    crc32: int


class Best(Config):
    """The best evaluated state so far.

    Attributes:
        step: updates done.
        bits_per_byte: on the validation split.
    """

    step: int
    bits_per_byte: float


class Meta(Config):
    """What a checkpoint says about itself.

    Attributes:
        format: of the checkpoint.
        step: updates done.
        config_hash: of the run's resolved configuration.
        data_fingerprint: of source and tokenizer.
        tokenizer_fingerprint: of the tokenizer alone.
        leaves: dotted name -> what it must be.
        progress: what the loop has to remember beside arrays: sums of the metrics line that is not
            written yet, seconds so far.
        best: the best evaluation so far.
        crc32: of all the other fields.
    """

    format: str = FORMAT
    step: int
    config_hash: str
    data_fingerprint: str
    tokenizer_fingerprint: str
    leaves: dict[str, Leaf]
    progress: dict[str, Any]
    best: Best | None
    crc32: int = 0

    def sealed(self) -> "Meta":
        """The same with its checksum."""
        text = self.model_dump_json(exclude={"crc32"})
        return self.model_copy(update={"crc32": zlib.crc32(text.encode())})


class Identity(NamedTuple):
    """What a checkpoint must belong to."""

    config_hash: str
    data_fingerprint: str
    tokenizer_fingerprint: str


class Corrupt(Exception):
    """A checkpoint cannot be read; the message says why."""


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by dotted name, such as `params.layer_0.mixer.w_q` or `opt_state.0.mu.embedding`."""
    return {
        _name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def unflatten(like: Any, leaves: dict[str, Any]) -> Any:
    """The inverse: a tree of the structure of `like`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [leaves[_name(path)] for path, _ in paths])


def check_leaves(saved: dict[str, Any], wanted: dict[str, Any], source: Path) -> None:
    """Compares names, shapes and dtypes.

    Args:
        saved: name -> anything with shape and dtype.
        wanted: likewise.
        source: of the checkpoint, for messages.

    Raises:
        CheckpointError: a leaf is missing, superfluous, or of another shape or dtype.
    """
    for name in wanted:
        if name not in saved:
            raise CheckpointError(f"{source}: has no leaf {name}, which this configuration needs")
    for name in saved:
        if name not in wanted:
            raise CheckpointError(f"{source}: has leaf {name}, which this configuration has not")
    for name, leaf in wanted.items():
        got, want = (_kind(saved[name]), _kind(leaf))
        if got != want:
            raise CheckpointError(f"{source}: leaf {name} is {got}, wanted {want}")


class Writer:
    """Saves checkpoints of one run in the background and deletes old ones.

    An old checkpoint is deleted only after a newer one is complete on disk.
    """

    def __init__(self, folder: Path, *, keep: int, identity: Identity):
        """Removes what a killed process left half written.

        Args:
            folder: of all checkpoints; only one process may write into it.
            keep: newest ones that stay.
            identity: written into each.
        """
        self._folder, self._keep, self._identity = folder.absolute(), keep, identity
        self._best: Best | None = None
        self._saving: int | None = None
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not path.name.isdigit():
                shutil.rmtree(path, ignore_errors=True)

    def save(self, state: Any, step: int, progress: dict[str, Any], best: Best | None) -> None:
        """Takes a copy and writes it in the background; waits for the save before.

        Args:
            state: the tree to save; may be donated as soon as this returns.
            step: updates done.
            progress: see `Meta`.
            best: see `Meta`; its checkpoint is kept.

        Raises:
            CheckpointError: this save or the one before failed.
        """
        self.wait()
        self._best = best
        leaves = {name: np.array(leaf) for name, leaf in flatten(jax.device_get(state)).items()}
        about = {name: describe(array) for name, array in leaves.items()}
        meta = Meta(
            step=step, **self._identity._asdict(), leaves=about, progress=progress, best=best
        ).sealed()
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            meta=ocp.args.JsonSave(meta.model_dump(mode="json")),
        )
        self._saving = step
        try:
            self._orbax.save(self._folder / str(step), args=items)
        except UNWRITABLE as error:
            raise self._failure(error) from error

    def check(self) -> None:
        """Raises what went wrong in the background, if anything has.

        Raises:
            CheckpointError: the save failed; names it and the newest complete one.
        """
        try:
            self._orbax.check_for_errors()
        except UNWRITABLE as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Waits until the save is on disk, then deletes old checkpoints.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self._orbax.wait_until_finished()
        except UNWRITABLE as error:
            raise self._failure(error) from error
        self._saving = None
        kept = set(steps_in(self._folder)[-self._keep :])
        if self._best is not None:
            kept.add(self._best.step)
        for step in steps_in(self._folder):
            if step not in kept:
                shutil.rmtree(self._folder / str(step))

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        steps = steps_in(self._folder)
        return self._folder / str(steps[-1]) if steps else None

    def close(self) -> None:
        """Ends the background threads; call `wait` first to hear of failures."""
        try:
            self._orbax.close()
        except UNWRITABLE:
            if self._saving is None:
                raise
            # The failed save has been reported, or another error is on its way out.

    def _failure(self, error: Exception) -> CheckpointError:
        newest = self.newest()
        kept = "there is none before it" if newest is None else f"the newest complete is {newest}"
        reason = " ".join(str(error).split())[:300]
        if "No space left" in reason or "ENOSPC" in reason:
            reason = "no space left on the disk"
        return CheckpointError(
            f"saving checkpoint {self._folder / str(self._saving)} failed: {reason}; {kept}"
        )


def steps_in(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def read(path: Path, wanted: dict[str, Any] | None, *, prefix: str = "") -> tuple[dict, Meta]:
    """Reads and checks one checkpoint.

    Args:
        path: its folder.
        wanted: name -> anything with shape and dtype, all leaves; None for whatever is there.
        prefix: read only leaves whose name begins so.

    Returns:
        NumPy arrays by name, and the description.

    Raises:
        Corrupt: it cannot be read, or its bytes are not those that were saved.
        CheckpointError: it is intact, but its leaves are not the wanted ones.
    """
    path = path.absolute()
    meta = read_meta(path)
    if wanted is not None:
        check_leaves(meta.leaves, wanted, path)
    handler = ocp.PyTreeCheckpointHandler()
    arrays = {}
    # One leaf at a time: a failure then leaves no other reads behind that end in tracebacks.
    for name in meta.leaves:
        if name.startswith(prefix):
            arrays[name] = _read_leaf(handler, path / "state", name)
            if describe(arrays[name]) != meta.leaves[name]:
                raise Corrupt(f"leaf {name} is not what was saved (checksum)")
    return arrays, meta


def _read_leaf(handler: ocp.PyTreeCheckpointHandler, folder: Path, name: str) -> np.ndarray:
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
    args = ocp.args.PyTreeRestore(item={name: 0}, restore_args=as_numpy, partial_restore=True)
    try:
        return np.asarray(handler.restore(folder, args=args)[name])
    except UNREADABLE as error:
        raise Corrupt(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def read_meta(path: Path) -> Meta:
    """Reads a checkpoint's description.

    Raises:
        Corrupt: missing or damaged.
        CheckpointError: of a format that this version does not know.
    """
    file = path / "meta" / "metadata"
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Corrupt(f"{file.name} cannot be read: {error}") from None
    if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"{path}: format {raw['format']!r}, this version reads {FORMAT!r}")
    try:
        meta = Meta.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        raise Corrupt(f"{file.name} is damaged: {error.error_count()} faults") from None
    if meta.sealed() != meta:
        raise Corrupt(f"{file.name} is not what was saved (checksum)")
    return meta


def read_newest(
    folder: Path, wanted: dict[str, Any], identity: Identity, *, set_aside: Path
) -> tuple[dict, Meta] | None:
    """Reads the newest intact checkpoint; damaged newer ones are named in a warning and moved.

    Args:
        folder: of all checkpoints.
        wanted: as for `read`.
        identity: what it must belong to.
        set_aside: folder that damaged checkpoints are moved into.

    Returns:
        Arrays by name and description, or None where no checkpoint was ever completed.

    Raises:
        CheckpointError: all are damaged, or one belongs to another run.
    """
    steps = steps_in(folder)
    for step in reversed(steps):
        path = folder / str(step)
        try:
            arrays, meta = read(path, wanted)
        except Corrupt as error:
            older = [s for s in steps if s < step]
            where = f"the one before it, {folder / str(older[-1])}" if older else "none: no other"
            warnings.warn(f"checkpoint {path} is corrupt ({error}); using {where}", stacklevel=2)
            set_aside.mkdir(parents=True, exist_ok=True)
            path.rename(_free(set_aside, path.name))
            continue
        check_identity(meta, identity, path)
        return arrays, meta
    if steps:
        raise CheckpointError(
            f"{folder}: all {len(steps)} checkpoints are corrupt (now in {set_aside}); run again "
            "to train from the start"
        )
    return None


def check_identity(meta: Meta, identity: Identity, path: Path) -> None:
    """Refuses a checkpoint of another configuration, corpus or tokenizer.

    Raises:
        CheckpointError: names the first that differs, with both values.
    """
    for key, wanted in reversed(identity._asdict().items()):
        got = getattr(meta, key)
        if got != wanted:
            raise CheckpointError(
                f"{path}: belongs to another run: {key} is {got[:12]}, this run's is {wanted[:12]}"
            )


def describe(array: np.ndarray) -> Leaf:
    """Shape, dtype and checksum of an array."""
    data = np.ascontiguousarray(array)
    crc = zlib.crc32(data.reshape(-1).view(np.uint8))
    return Leaf(shape=tuple(array.shape), dtype=str(array.dtype), crc32=crc)


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _name(path: tuple) -> str:
    """Dotted name of a leaf from JAX's key path."""
    parts = []
    for entry in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
    return ".".join(parts)


def _free(folder: Path, name: str) -> Path:
    for number in itertools.count(1):
        path = folder / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise AssertionError  # itertools.count has no end
