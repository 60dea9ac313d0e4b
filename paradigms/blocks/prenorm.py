"""Pre-norm residual wiring: `x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

from typing import Any, Literal

from jax import Array

from ..config import Config
from ..context import LayerContext
from ..layers.norm import make_norm
from ..layers.params import Build
from .block import Block, Mix, Parts, refuse_several


class PreNormConfig(Config):
    """Pre-norm wiring; has no settings."""

    name: Literal["prenorm"] = "prenorm"

    def refuses(self, parts: Parts) -> str | None:
        """One mixer at most."""
        return refuse_several(self.name, parts)

    def build(self, build: Build, parts: Parts) -> "PreNorm":
        """Makes the layer with its parts."""
        mixers = [mixer.build(build) for mixer in parts.mixers]
        return PreNorm(build, mixers, parts.build_mlp(build), parts.dropout)


class PreNorm(Block):
    """A norm before each part that is there."""

    def __init__(self, build: Build, mixers: list[Any], mlp: Any, dropout_rate: float):
        """Adds the norms."""
        super().__init__(build, mixers, mlp, dropout_rate)
        self.mixer_norm = make_norm(build) if mixers else None
        self.mlp_norm = None if mlp is None else make_norm(build)

    def wire(self, x: Array, mix: Mix, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""
        if self.mixer_norm is not None:
            x = x + self.drop(mix(0, self.mixer_norm(x)), ctx, 0)
        if self.mlp_norm is None:
            return x, {}
        y, aux = self.run_mlp(self.mlp_norm(x), ctx)
        return x + y, aux
