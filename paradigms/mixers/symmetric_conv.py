"""Short symmetric convolution: each token looks at its nearest neighbours on both sides.

For bidirectional models only. In masked diffusion it hands a hidden position, which has no input of
its own, the tokens beside it, which attention alone takes long to learn.
"""

from typing import Any, Literal, NoReturn

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int
from pydantic import Field, field_validator

from ...errors import ConfigError
from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.params import Build, shape_of

NO_STATE = (
    "symmetric_conv looks at later tokens, so it has no state that new tokens could extend; "
    "use it under masked diffusion, or a causal mixer"
)
NO_CAUSAL = (
    "symmetric_conv looks at later tokens and cannot honour a causal mask; "
    "use it under masked diffusion, or a causal mixer"
)
NO_TREE = "symmetric_conv cannot follow the branches of a draft tree"


class SymmetricConvConfig(Config):
    """A depthwise convolution centred on each token.

    Attributes:
        kernel_size: W, odd: a token sees (W - 1) / 2 neighbours on either side.
    """

    name: Literal["symmetric_conv"] = "symmetric_conv"
    kernel_size: int = Field(default=5, ge=3)

    @field_validator("kernel_size")
    @classmethod
    def _is_odd(cls, kernel_size: int) -> int:
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size}: want an odd number, centred on the token")
        return kernel_size

    def build(self, build: Build) -> "SymmetricConv":
        """Makes the mixer."""
        return SymmetricConv(self, build)


class SymmetricConv(nnx.Module):
    """`y_t = sum_j w_j * x_(t+j)` over the visible neighbours, each channel on its own.

    "Visible" is the mask's rule: the same document, and within the token's interval or of its tag.
    """

    def __init__(self, config: SymmetricConvConfig, build: Build):
        """Draws the W taps per channel."""
        self.w_taps = build.normal((config.kernel_size, build.width), config.kernel_size**-0.5)

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> NoReturn:
        """Refuses."""
        del batch, max_len, dtype
        raise ConfigError(NO_STATE)

    def __call__(
        self, x: Float[Array, "B T D"], state: None, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], None]:
        """Convolves; there is no state."""
        if state is not None:
            raise ConfigError(NO_STATE)
        taps = self.w_taps[...].astype(x.dtype)
        reach = taps.shape[0] // 2
        # Behind the row's length anything may stand, NaN included.
        x = jnp.where(ctx.segment_ids[:, :, None] >= 0, x, 0)
        y = x * taps[reach]
        for offset in range(-reach, reach + 1):
            if offset and abs(offset) < x.shape[1]:
                seen = jnp.where(_visible(ctx, offset)[:, :, None], _moved(x, offset, 0), 0)
                y += seen * taps[reach + offset]
        return y, None

    def verify(self, x: Array, state: Any, ctx: LayerContext) -> NoReturn:
        """Refuses."""
        del x, state, ctx
        raise ConfigError(NO_STATE)

    def commit(self, state: Any, pending: Any, path: Array, accepted: Array) -> NoReturn:
        """Refuses."""
        del state, pending, path, accepted
        raise ConfigError(NO_STATE)

    def cost(self, batch: int, new_tokens: int, context: int, bytes_per_value: int) -> Cost:
        """W multiply-adds per channel and token, no state."""
        del context, bytes_per_value
        taps, width = shape_of(self.w_taps)
        flops = float(2 * batch * new_tokens * taps * width)
        return Cost(flops, 0.0, 0.0, 0.0, mixing_flops=flops)

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """Refuses state, causal masks and draft trees."""
        if stateful:
            return NO_STATE
        if ctx.parents is not None:
            return NO_TREE
        return NO_CAUSAL if ctx.mask_is_causal else None


def _moved(values: Array, offset: int, fill: int) -> Array:
    """`values[:, t + offset]` at t, `fill` beyond the ends."""
    widths = [(0, 0)] * values.ndim
    widths[1] = (max(-offset, 0), max(offset, 0))
    length = values.shape[1]
    start = max(offset, 0)
    return jnp.pad(values, widths, constant_values=fill)[:, start : start + length]


def _visible(ctx: LayerContext, offset: int) -> Bool[Array, "B T"]:
    """True where token t may look at token t + offset."""
    order: Int[Array, "B T"] = _moved(ctx.order, offset, -1)
    bounds = ctx.bounds
    inside = (bounds.q_lo <= order) & (order <= bounds.q_hi)
    if bounds.q_tag is not None and bounds.k_tag is not None:
        tag = _moved(bounds.k_tag, offset, -1)
        inside |= (bounds.q_tag == tag) & (tag >= 0)
    segment = _moved(ctx.segment_ids, offset, -1)
    return inside & (segment == ctx.segment_ids) & (segment >= 0)
