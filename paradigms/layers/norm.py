"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from .params import Float32Param


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"] | None, eps: float) -> Array:
    """`x / rms(x) * scale` over the last axis (arXiv 1910.07467, eq. 4), computed in float32.

    Returns:
        The result in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * scale
    return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with a learnt scale that starts at one."""

    def __init__(self, width: int, eps: float):
        """Makes a norm over `width` channels."""
        self.scale = Float32Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises the last axis."""
        return rms_norm(x, self.scale[...], self.eps)
