"""A run's parameters in one safetensors file, in the dtype that they were published in.

A trained run's checkpoint holds the whole state of training, in float32. An imported run has
parameters alone, perhaps larger than memory in float32: they are written one after another and
memory-mapped when they are read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ...errors import CheckpointError
from ..checkpoint import Corrupt, Identity, Leaf, Meta, describe
from .tensor_files import Spec, TensorFile, TensorWriter

PARAMS = "params.safetensors"
META = "genlab"
ROOM_PER_LEAF, ROOM = 160, 1024  # bytes of description in the header


class ParamsWriter:
    """Writes the file, one parameter at a time, in any order."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], identity: Identity):
        """Lays the file out.

        Args:
            folder: of the checkpoint; must exist.
            specs: dotted name -> what the parameter will be.
            identity: what the parameters belong to.
        """
        room = ROOM + sum(ROOM_PER_LEAF + 2 * len(name) for name in specs)
        self._writer = TensorWriter(folder / PARAMS, specs, metadata_room=room)
        self._identity = identity
        self._leaves: dict[str, Leaf] = {}

    def __enter__(self) -> "ParamsWriter":
        """Returns the writer."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Deletes what is unfinished."""
        self._writer.__exit__(*error)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes one parameter."""
        array = np.ascontiguousarray(array)
        self._writer.write(name, array)
        self._leaves[name] = describe(array)

    def close(self) -> None:
        """Completes the file."""
        meta = Meta(
            step=0, **self._identity._asdict(), leaves=self._leaves, progress={}, best=None
        ).sealed()
        self._writer.close({META: meta.model_dump_json()})


def is_params_folder(folder: Path) -> bool:
    """True where a checkpoint is such a file."""
    return (folder / PARAMS).exists()


def read_params_file(
    folder: Path, wanted: Mapping[str, Any], check: Callable[[Meta, Path], None]
) -> dict[str, np.ndarray]:
    """Reads and checks the parameters.

    Args:
        folder: of the checkpoint.
        wanted: dotted name -> anything with a shape: all that must be there.
        check: called with the description, to refuse parameters of another run.

    Returns:
        Views of the file by dotted name.

    Raises:
        Corrupt: it cannot be read, or its bytes are not those that were written.
        CheckpointError: names or shapes are not the wanted ones.
    """
    path = folder / PARAMS
    try:
        file = TensorFile(path)
    except CheckpointError as error:
        raise Corrupt(str(error)) from None
    try:
        meta = Meta.model_validate_json(file.metadata.get(META, ""))
    except ValidationError:
        raise Corrupt(f"{PARAMS} has no description") from None
    if meta.sealed() != meta:
        raise Corrupt(f"{PARAMS} is not what was written (checksum of the description)")
    check(meta, path)
    for name in wanted:
        if name not in file.specs:
            raise CheckpointError(f"{path}: has no parameter {name}, which the model needs")
    for name, spec in file.specs.items():
        if name not in wanted:
            raise CheckpointError(f"{path}: has parameter {name}, which the model has not")
        if spec.shape != tuple(wanted[name].shape):
            raise CheckpointError(
                f"{path}: parameter {name} is {spec}, want shape {list(wanted[name].shape)}"
            )
    arrays = {name: file[name] for name in wanted}
    for name, array in arrays.items():
        if describe(array) != meta.leaves.get(name):
            raise Corrupt(f"parameter {name} is not what was written (checksum)")
    return arrays
