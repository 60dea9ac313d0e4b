"""The public grouped matmul: checks and the choice of an implementation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..compat import target_platform
from ..dispatch import Implementation, KernelArgumentError, check_array, choose
from . import pallas_mosaic_gpu, pallas_tpu, reference, xla

_OP = "grouped_matmul"

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(reference.run),
    "xla": Implementation(xla.run),
    "pallas_tpu": Implementation(pallas_tpu.run, pallas_tpu.supports),
    "pallas_mosaic_gpu": Implementation(pallas_mosaic_gpu.run, pallas_mosaic_gpu.supports),
}
# Names by platform, fastest first.
PREFERRED = {
    "cpu": ("xla",),
    "gpu": ("pallas_mosaic_gpu", "xla"),
    "tpu": ("pallas_tpu", "xla"),
}


def grouped_matmul(
    x: Float[Array, "T D"],
    w: Sequence[Float[Array, "D F"]] | Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "T F"]:
    """Multiplies rows that are sorted by group with their groups' matrices.

    The first `group_sizes[0]` rows are multiplied with `w[0]`, the next `group_sizes[1]` with
    `w[1]`, and so on. No row is dropped, whatever the sizes, and none depends on another. A group
    without rows costs nothing: its matrix is not read (it may hold NaN). Products are summed in
    float32.

    Args:
        x: rows; those behind the last group are not read.
        w: one matrix per group, best as separate arrays: a slice of one array is a copy.
        group_sizes: rows per group; their sum must not be above T. Values are data, so they are
            not checked.
        implementation: see `kernels.dispatch`.

    Returns:
        In x.dtype; 0 in rows behind the last group. Differentiable in x and w, in reverse mode.

    Raises:
        KernelArgumentError: a shape, dtype or implementation is wrong.
    """
    check_array(_OP, "x", x, "T D")
    if hasattr(w, "shape"):
        check_array(_OP, "w", w, "E D F")
    elif not isinstance(w, Sequence):
        raise KernelArgumentError(f"{_OP}: w is of type {type(w).__name__}; want matrices")
    w = tuple(w)
    if not w:
        raise KernelArgumentError(f"{_OP}: w is empty; want a matrix for each group")
    check_array(_OP, "w[0]", w[0], "D F")
    for index, matrix in enumerate(w):
        check_array(_OP, f"w[{index}]", matrix, (x.shape[1], w[0].shape[1]))
    check_array(_OP, "group_sizes", group_sizes, (len(w),), "integer")
    group_sizes = jnp.asarray(group_sizes).astype(jnp.int32)
    x, w = jnp.asarray(x), jax.tree.map(jnp.asarray, w)
    if x.shape[0] == 0:
        return jnp.zeros((0, w[0].shape[1]), x.dtype)
    preferred = PREFERRED[target_platform()]
    name = choose(_OP, IMPLEMENTATIONS, preferred, implementation, x, w, group_sizes)
    return IMPLEMENTATIONS[name].run(x, w, group_sizes)
