"""Normalisation: root mean square, and with mean and bias."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from .params import Build, Float32Param


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


def layer_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Array:
    """`(x - mean) / std * scale + bias` over the last axis (arXiv 1607.06450), in float32.

    Returns:
        The result in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps) * scale + bias).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`layer_norm` with a learnt scale that starts at one and a bias that starts at zero."""

    def __init__(self, width: int, eps: float):
        """Makes a norm over `width` channels."""
        self.scale = Float32Param(jnp.ones((width,), jnp.float32))
        self.bias = Float32Param(jnp.zeros((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises the last axis."""
        return layer_norm(x, self.scale[...], self.bias[...], self.eps)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def make_norm(build: Build, width: int | None = None) -> RMSNorm | LayerNorm:
    """A norm of the model's kind, over D channels if not told otherwise."""
    return NORMS[build.norm](build.width if width is None else width, build.norm_eps)
