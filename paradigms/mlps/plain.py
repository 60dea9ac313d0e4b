"""MLP of two matrices, as in the first transformer (arXiv 1706.03762, eq. 2)."""

from typing import Literal

from flax import nnx
from jaxtyping import Array, Float
from pydantic import Field

from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.activations import ACTIVATIONS
from ..layers.params import Build, adapted, plus, shape_of


class PlainConfig(Config):
    """An MLP of two matrices.

    Attributes:
        width: F.
        activation: between them; `gelu_tanh` is an approximation of `gelu`.
        bias: add a learnt bias behind each.
    """

    name: Literal["plain"] = "plain"
    width: int = Field(ge=1)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"
    bias: bool = True

    def build(self, build: Build) -> "PlainMLP":
        """Makes the MLP."""
        return PlainMLP(self, build)


class PlainMLP(nnx.Module):
    """`act(x W_up + b_up) W_down + b_down`."""

    adaptable = ("w_up", "w_down")

    def __init__(self, config: PlainConfig, build: Build):
        """Draws the two projections."""
        self.activation = config.activation
        self.w_up = build.matrix(build.width, config.width)
        self.w_down = build.matrix(config.width, build.width, residual=True)
        self.b_up = build.zeros(config.width) if config.bias else None
        self.b_down = build.zeros(build.width) if config.bias else None

    def __call__(
        self, x: Float[Array, "B T D"], ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Returns the output and no losses."""
        hidden = ACTIVATIONS[self.activation](plus(adapted(x, self.w_up, ctx, "w_up"), self.b_up))
        return plus(adapted(hidden, self.w_down, ctx, "w_down"), self.b_down), {}

    def cost(self, batch: int, new_tokens: int) -> Cost:
        """Two matrices, no state."""
        rows, columns = shape_of(self.w_up)
        return Cost(float(batch * new_tokens * 2 * 2 * rows * columns), 0.0, 0.0, 0.0)
