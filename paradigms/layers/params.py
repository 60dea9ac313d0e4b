"""Kinds of parameters and how they begin."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .linear import linear


class Float32Param(nnx.Param):
    """A parameter that stays float32 whatever the compute dtype, and is never decayed.

    Norm scales, and the decay rates and step biases of state-space layers: rounding these to
    bfloat16 is known to make training diverge.
    """


class Build(NamedTuple):
    """What every component is told when it is built.

    Attributes:
        width: D.
        depth: number of layers; residual outputs start smaller the more of them add up.
        max_len: longest row the model is meant for.
        norm_eps: epsilon of the norms.
        rngs: source of PRNG keys, advanced by each draw.
        input_width: width of the mixer's input where it is not D (a shared block's).
        meta_tokens: learnt tokens that every document begins with.
        norm: kind of the blocks' norms, see `ModelConfig`.
    """

    width: int
    depth: int
    max_len: int
    norm_eps: float
    rngs: nnx.Rngs
    input_width: int | None = None
    meta_tokens: int = 0
    norm: str = "rms"

    @property
    def read_width(self) -> int:
        """Width of what the mixer is given; D unless `input_width` says else."""
        return self.width if self.input_width is None else self.input_width

    def matrix(self, rows: int, columns: int, *, residual: bool = False) -> nnx.Param:
        """A (rows columns) matrix applied as `x @ w`, normal with variance 1/rows.

        Args:
            rows: input width.
            columns: output width.
            residual: True for a projection that writes into the residual stream: scaled down by
                sqrt(2 depth), as in GPT-2.
        """
        scale = 1 / math.sqrt(rows)
        if residual:
            scale /= math.sqrt(2 * self.depth)
        return self.normal((rows, columns), scale)

    def normal(self, shape: tuple[int, ...], scale: float) -> nnx.Param:
        """A parameter drawn from a normal law cut off at three standard deviations."""
        draw = jax.random.truncated_normal(self.rngs.params(), -3.0, 3.0, shape, jnp.float32)
        return nnx.Param(scale * draw)

    def zeros(self, width: int) -> nnx.Param:
        """A bias of that width, zero at first."""
        return nnx.Param(jnp.zeros((width,), jnp.float32))


def plus(y: Array, bias: nnx.Param | None) -> Array:
    """`y + bias` in y's dtype; y where there is no bias."""
    return y if bias is None else y + bias[...].astype(y.dtype)


def adapted(x: Array, weight: nnx.Param, ctx: Any, name: str) -> Array:
    """`x @ weight`, plus the low-rank adapter that `ctx` holds for that name, if any.

    `x W + (x A) B` (LoRA, arXiv 2106.09685, eq. 3): what a shared block's invocations differ in.
    """
    y = linear(x, weight[...])
    if ctx.adapters is None or name not in ctx.adapters:
        return y
    down, up = ctx.adapters[name]
    return y + linear(linear(x, down), up)


def weight_bytes(module: nnx.Module, bytes_per_value: int) -> float:
    """Bytes of a module's parameters when computing with values of that size."""
    total = 0
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        size = 4 if is_float32_param(variable) else bytes_per_value
        total += math.prod(shape_of(variable)) * size
    return float(total)


def count_params(module: nnx.Module) -> int:
    """Number of a module's parameters."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return sum(math.prod(shape_of(variable)) for _, variable in flat)


def shape_of(variable: nnx.Param) -> tuple[int, ...]:
    """A parameter's shape, of a module that holds arrays or only their shapes."""
    return variable.get_value().shape


def is_float32_param(variable: Any) -> bool:
    """True for variables that keep float32."""
    return isinstance(variable, Float32Param)


def decays(variable: Any) -> bool:
    """True for variables that weight decay applies to: matrices, but not norms and rates."""
    return not isinstance(variable, Float32Param) and len(shape_of(variable)) >= 2


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes elements with probability `rate` and scales the rest; the identity without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
