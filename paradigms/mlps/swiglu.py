"""Gated MLP (arXiv 2002.05202, eq. 6)."""

from typing import Literal

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float
from pydantic import Field

from ..config import Config
from ..interface import Cost
from ..layers.params import Build, shape_of


class SwiGLUConfig(Config):
    """SwiGLU as a layer's MLP.

    Attributes:
        width: F.
    """

    name: Literal["swiglu"] = "swiglu"
    width: int = Field(ge=1)

    def build(self, build: Build) -> "SwiGLU":
        """Makes the MLP."""
        return SwiGLU(self, build)


class SwiGLU(nnx.Module):
    """`(silu(x W_gate) * (x W_up)) W_down`."""

    def __init__(self, config: SwiGLUConfig, build: Build):
        """Draws the three projections."""
        self.w_gate = build.matrix(build.width, config.width)
        self.w_up = build.matrix(build.width, config.width)
        self.w_down = build.matrix(config.width, build.width, residual=True)

    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Returns the output and auxiliary sums (none)."""
        gate = jax.nn.silu(x @ self.w_gate[...].astype(x.dtype))
        up = x @ self.w_up[...].astype(x.dtype)
        return (gate * up) @ self.w_down[...].astype(x.dtype), {}

    def cost(self, batch: int, new_tokens: int) -> Cost:
        """Three matrices, no state."""
        rows, columns = shape_of(self.w_gate)
        return Cost(float(batch * new_tokens * 3 * 2 * rows * columns), 0.0, 0.0, 0.0)
