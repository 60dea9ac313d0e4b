"""Rotary position embedding (arXiv 2104.09864)."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def rotary_phases(
    positions: Int[Array, "B T"], head_dim: int, base: float
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Cosine and sine of `position * base^(-2i/H)` for i < H/2, always in float32.

    Computed from integer positions at each call: there is no table that a cast could spoil.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = positions[..., None].astype(jnp.float32) * base**-exponent
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T N H"], phases: tuple[Float[Array, "B T h"], Float[Array, "B T h"]]
) -> Float[Array, "B T N H"]:
    """Rotates the pairs (x_i, x_{i+H/2}) by their phases, in float32; returns x's dtype."""
    cos, sin = (p[:, :, None, :] for p in phases)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
