"""Moves tensors between a published checkpoint and our parameters, one row of the table at a time.

All names and shapes are compared before the first tensor is read, so that a foreign or broken
checkpoint fails at once and with the name of what is wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ...errors import CheckpointError
from ...paradigms.backbone import ModelConfig
from ...paradigms.model import abstract_model
from ..checkpoint import flatten
from .architecture import Architecture, Row, published_shapes
from .tensor_files import Spec, Tensors

Progress = Callable[[int, int], None]  # bytes done, bytes in all

FLOATS = {np.dtype(t) for t in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)}
# What holds every value of a published dtype exactly and is one of ours.
EXACT = {np.dtype(ml_dtypes.bfloat16): np.dtype(ml_dtypes.bfloat16)}
CHOICES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def check_tensors(
    architecture: Architecture, model: ModelConfig, found: Tensors
) -> list[Row]:
    """Compares a checkpoint's tensors with what the model needs.

    Returns:
        The rows to read.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or of no floating dtype.
    """
    params = flatten(abstract_model(model).params)
    rows = architecture.rows_of(model)
    copies = architecture.copies(model)
    wanted: dict[str, tuple[int, ...]] = {}
    for row in rows:
        wanted |= published_shapes(row, params)
    for name, shape in wanted.items():
        if name not in found.specs:
            raise CheckpointError(
                f"{found.path}: tensor {name} is missing, which {architecture.name} needs with "
                f"shape {list(shape)}"
            )
        spec = found.specs[name]
        if spec.dtype not in FLOATS:
            raise CheckpointError(
                f"{found.file_of(name)}: tensor {name} is {spec}; want a floating dtype "
                "(quantised checkpoints are not implemented)"
            )
        if spec.shape != shape:
            raise CheckpointError(
                f"{found.file_of(name)}: tensor {name} is {spec}, want shape {list(shape)} by "
                "config.json"
            )
    for name in found.specs:
        if name in wanted or name.endswith(architecture.ignored):
            continue
        if name not in copies:
            raise CheckpointError(
                f"{found.file_of(name)}: tensor {name} is not implemented for {architecture.name}"
            )
        if not np.array_equal(found[name], found[copies[name]]):
            raise CheckpointError(
                f"{found.file_of(name)}: tensor {name} differs from {copies[name]}, but "
                "config.json ties them"
            )
    return rows


def target_dtype(published: np.dtype, dtype: str | None) -> np.dtype:
    """The dtype that a tensor is kept in: the chosen one, else one that loses nothing."""
    return EXACT.get(published, np.dtype(np.float32)) if dtype is None else CHOICES[dtype]


def param_specs(
    rows: list[Row], model: ModelConfig, found: Tensors, dtype: str | None
) -> dict[str, Spec]:
    """What each parameter will be, by dotted name."""
    params = flatten(abstract_model(model).params)
    specs = {}
    for row in rows:
        # All parts of a fused tensor share its dtype; the widest of several wins.
        kinds = [target_dtype(found.specs[name].dtype, dtype) for name in row.theirs]
        widest = max(kinds, key=lambda kind: kind.itemsize)
        for name in row.ours:
            specs[name] = Spec(widest, tuple(params[name].shape))
    return specs


def read_params(
    rows: list[Row],
    specs: Mapping[str, Spec],
    found: Tensors,
    progress: Progress | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields parameters by dotted name; one row is in memory at a time.

    Raises:
        CheckpointError: a value is NaN or infinite, before or after the change of dtype.
    """
    total = sum(found.specs[name].nbytes for row in rows for name in row.theirs)
    done = 0
    for row in rows:
        published = []
        for name in row.theirs:
            array = found[name]
            _refuse_non_finite(array, name, found, "holds")
            published.append(array)
        dtype = specs[row.ours[0]].dtype
        for name, array in zip(row.ours, row.form.to_ours(*published), strict=True):
            if array.dtype != dtype:
                with np.errstate(over="ignore"):
                    array = array.astype(dtype)
                _refuse_non_finite(array, row.theirs[0], found, f"as {dtype.name} holds")
            yield name, np.ascontiguousarray(array)
        done += sum(found.specs[name].nbytes for name in row.theirs)
        if progress is not None:
            progress(done, total)


def written_specs(
    rows: list[Row], params: Mapping[str, Any], dtype: str | None
) -> dict[str, Spec]:
    """What each published tensor will be, by its name, in the order of the table.

    Args:
        rows: of the table.
        params: dotted name -> array.
        dtype: of all tensors; None keeps the parameters'.
    """
    specs = {}
    for row in rows:
        kinds = [np.dtype(params[name].dtype) for name in row.ours]
        widest = max(kinds, key=lambda kind: kind.itemsize)
        chosen = widest if dtype is None else CHOICES[dtype]
        for name, shape in published_shapes(row, dict(params)).items():
            specs[name] = Spec(chosen, shape)
    return specs


def published_tensors(
    rows: list[Row], params: Mapping[str, Any], specs: Mapping[str, Spec]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields published tensors by name; one row is in memory at a time."""
    for row in rows:
        ours = [np.asarray(params[name]) for name in row.ours]
        for name, array in zip(row.theirs, row.form.to_theirs(*ours), strict=True):
            yield name, np.ascontiguousarray(array.astype(specs[name].dtype, copy=False))


def _refuse_non_finite(array: np.ndarray, name: str, found: Tensors, verb: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        at = [int(i) for i in np.argwhere(~finite)[0]]
        raise CheckpointError(
            f"{found.file_of(name)}: tensor {name} {verb} {float(array[tuple(at)])} at {at}"
        )
