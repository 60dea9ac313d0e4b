"""What the state-space mixers share: how step sizes and convolutions begin, and replayed paths."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from ..context import LayerContext
from ..layers.params import Build, Float32Param


def step_bias(build: Build, shape: tuple[int, ...], low: float, high: float, floor: float) -> Any:
    """A bias whose softplus is log-uniform in [low, high], and at least `floor`.

    Section 3.6 of arXiv 2312.00752: step sizes at initialisation.
    """
    draw = jax.random.uniform(build.rngs.params(), shape, jnp.float32)
    step = jnp.exp(draw * (math.log(high) - math.log(low)) + math.log(low))
    step = jnp.maximum(step, floor)
    return Float32Param(step + jnp.log(-jnp.expm1(-step)))


def conv_kernel(build: Build, width: int, channels: int) -> nnx.Param:
    """Taps (W E), uniform with bound 1/sqrt(W): each channel has W inputs."""
    bound = 1 / math.sqrt(width)
    shape = (width, channels)
    draw = jax.random.uniform(build.rngs.params(), shape, jnp.float32, -bound, bound)
    return nnx.Param(draw)


def refuse_lookahead(kind: str, ctx: LayerContext) -> str | None:
    """The reason why a recurrence cannot honour a mask that looks ahead."""
    if ctx.mask_is_causal:
        return None
    return f"{kind} carries a state forward in time and needs a causal mask; use attention instead"


def known_state(state: Array, start: Int[Array, " B"]) -> Array:
    """The state, with zeros in rows without history, whose memory may hold anything."""
    begun = (start > 0).reshape((-1,) + (1,) * (state.ndim - 1))
    return jnp.where(begun, state, jnp.zeros((), state.dtype))


def along(values: Float[Array, "B T ..."], path: Int[Array, "B K"]) -> Float[Array, "B K ..."]:
    """Values of the tokens on a path."""
    at = path.reshape(path.shape + (1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, at, axis=1)
