"""What the Pallas kernels of several ops need: sizes rounded to blocks."""

import jax
import jax.numpy as jnp


def round_up(size: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def pad_axis(v: jax.Array, axis: int, size: int, value: float | int = 0) -> jax.Array:
    """Returns `v` with `value` appended along `axis` up to `size`; `v` itself if it fits."""
    if v.shape[axis] == size:
        return v
    widths = [(0, 0)] * v.ndim
    widths[axis] = (0, size - v.shape[axis])
    return jnp.pad(v, widths, constant_values=value)
