"""Gated MLP (arXiv 2002.05202, eq. 6)."""

from typing import Literal

from flax import nnx
from jax import Array
from jaxtyping import Float
from pydantic import Field

from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.activations import ACTIVATIONS
from ..layers.params import Build, adapted, plus, shape_of


class SwiGLUConfig(Config):
    """SwiGLU as a layer's MLP.

    Attributes:
        width: F.
        activation: of the gate; with gelu this is GEGLU (eq. 5), `gelu_tanh` its approximation.
        bias: add a learnt bias to each of the three projections.
        multipliers: factors on the gate inside its activation and on the output (Falcon-H1, arXiv
            2507.22448).
    """

    name: Literal["swiglu"] = "swiglu"
    width: int = Field(ge=1)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    bias: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)

    def build(self, build: Build) -> "SwiGLU":
        """Makes the MLP."""
        return SwiGLU(self, build)


class SwiGLU(nnx.Module):
    """`(silu(x W_gate) * (x W_up)) W_down`."""

    adaptable = ("w_gate", "w_up", "w_down")

    def __init__(self, config: SwiGLUConfig, build: Build):
        """Draws the three projections."""
        self.activation, self.multipliers = config.activation, config.multipliers
        self.w_gate = build.matrix(build.width, config.width)
        self.w_up = build.matrix(build.width, config.width)
        self.w_down = build.matrix(config.width, build.width, residual=True)
        self.b_gate = build.zeros(config.width) if config.bias else None
        self.b_up = build.zeros(config.width) if config.bias else None
        self.b_down = build.zeros(build.width) if config.bias else None

    def __call__(
        self, x: Float[Array, "B T D"], ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Returns the output and no losses."""
        gate = plus(adapted(x, self.w_gate, ctx, "w_gate"), self.b_gate)
        up = plus(adapted(x, self.w_up, ctx, "w_up"), self.b_up)
        of_gate, of_output = self.multipliers
        gate = gate if of_gate == 1.0 else gate * of_gate
        hidden = ACTIVATIONS[self.activation](gate) * up
        y = plus(adapted(hidden, self.w_down, ctx, "w_down"), self.b_down)
        return y if of_output == 1.0 else y * of_output, {}

    def cost(self, batch: int, new_tokens: int) -> Cost:
        """Three matrices, no state."""
        rows, columns = shape_of(self.w_gate)
        return Cost(float(batch * new_tokens * 3 * 2 * rows * columns), 0.0, 0.0, 0.0)
