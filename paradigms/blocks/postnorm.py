"""Post-norm residual wiring: `norm(x + mixer(x))`, then `norm(x + mlp(x))`."""

from typing import Any, Literal

from jax import Array

from ..config import Config
from ..context import LayerContext
from ..layers.norm import make_norm
from ..layers.params import Build
from .block import Block, Mix, Parts, refuse_several


class PostNormConfig(Config):
    """Post-norm wiring, as in the first transformer (arXiv 1706.03762); has no settings."""

    name: Literal["postnorm"] = "postnorm"

    def refuses(self, parts: Parts) -> str | None:
        """One mixer at most."""
        return refuse_several(self.name, parts)

    def build(self, build: Build, parts: Parts) -> "PostNorm":
        """Makes the layer with its parts."""
        mixers = [mixer.build(build) for mixer in parts.mixers]
        return PostNorm(build, mixers, parts.build_mlp(build), parts.dropout)


class PostNorm(Block):
    """A norm after each part's sum with the residual."""

    def __init__(self, build: Build, mixers: list[Any], mlp: Any, dropout_rate: float):
        """Adds the norms."""
        super().__init__(build, mixers, mlp, dropout_rate)
        self.mixer_norm = make_norm(build) if mixers else None
        self.mlp_norm = None if mlp is None else make_norm(build)

    def wire(self, x: Array, mix: Mix, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """`norm(x + mixer(x))`, then `norm(x + mlp(x))`."""
        if self.mixer_norm is not None:
            x = self.mixer_norm(x + self.drop(mix(0, x), ctx, 0))
        if self.mlp_norm is None:
            return x, {}
        y, aux = self.run_mlp(x, ctx)
        return self.mlp_norm(x + y), aux
