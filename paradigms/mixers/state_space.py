"""What the state-space mixers share: how step sizes and convolutions begin, and replayed paths."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

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


def known_state(
    state: Array, start: Int[Array, " B"], begin: Float[Array, "1 ..."] | None = None
) -> Array:
    """The state; in rows without history what documents begin with: zeros unless `begin` says else.

    The memory of such rows may hold anything.
    """
    begun = (start > 0).reshape((-1,) + (1,) * (state.ndim - 1))
    return jnp.where(begun, state, jnp.zeros((), state.dtype) if begin is None else begin)


def conv_of_begin(
    taps: Float[Array, "W E"], tail: Float[Array, "1 W-1 E"], positions: Int[Array, "B T"]
) -> Float[Array, "B T E"]:
    """What a causal convolution adds when documents begin behind the inputs `tail`.

    Token p of a document reaches W-1-p inputs before its begin. This is linear, so it is added to a
    convolution that finds nothing there.

    Args:
        taps: the last one is of the token itself.
        tail: inputs before the documents, oldest first.
        positions: index of each token in its document, from 0.
    """
    width = taps.shape[0]
    total = jnp.zeros((*positions.shape, taps.shape[1]), jnp.float32)
    for back in range(1, width):
        at = width - 1 + positions - back
        reached = tail[0][jnp.clip(at, 0, width - 2)] * taps[width - 1 - back].astype(jnp.float32)
        total += jnp.where((positions < back)[:, :, None], reached, 0.0)
    return total


def since_reset(
    values: Float[Array, "B T X"], reset: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T X"], Bool[Array, "B T"]]:
    """Sums of `values` from the last reset on, that token included; and whether there was one."""

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        total, seen = right
        return jnp.where(seen, total, left[0] + total), left[1] | seen

    seen = jnp.broadcast_to(reset[:, :, None], values.shape)
    total, seen = jax.lax.associative_scan(join, (values, seen), axis=1)
    return total, seen[:, :, 0]


def last_of(values: Float[Array, "B T ..."], lengths: Int[Array, " B"]) -> Float[Array, "B ..."]:
    """The value of each row's last valid token (of the first where there is none)."""
    at = jnp.maximum(lengths - 1, 0).reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, at, axis=1)[:, 0]


def along(values: Float[Array, "B T ..."], path: Int[Array, "B K"]) -> Float[Array, "B K ..."]:
    """Values of the tokens on a path."""
    at = path.reshape(path.shape + (1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, at, axis=1)


def silu_like(x: Array, like: Array) -> Array:
    """SiLU in float32, in the dtype of `like`."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(like.dtype)
