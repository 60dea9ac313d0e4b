"""Parallel residual wiring: `x + mixer(norm(x)) + mlp(norm(x))`."""

from typing import Any, Literal

from jax import Array

from ..config import Config
from ..context import LayerContext
from ..layers.norm import make_norm
from ..layers.params import Build
from .block import Block, Mix, Parts, refuse_several


class ParallelConfig(Config):
    """Mixer and MLP side by side on the same input.

    Attributes:
        one_norm: mixer and MLP share a norm, as in GPT-J and PaLM (arXiv 2204.02311, sec. 2);
            False gives each its own, as in GPT-NeoX (arXiv 2204.06745, sec. 2.1).
    """

    name: Literal["parallel"] = "parallel"
    one_norm: bool = True

    def refuses(self, parts: Parts) -> str | None:
        """Exactly one mixer and an MLP."""
        if parts.mlp is None or not parts.mixers:
            return "block 'parallel' needs a mixer and an mlp"
        return refuse_several(self.name, parts)

    def build(self, build: Build, parts: Parts) -> "Parallel":
        """Makes the layer with its parts."""
        mixers = [mixer.build(build) for mixer in parts.mixers]
        mlp = parts.build_mlp(build)
        return Parallel(build, mixers, mlp, parts.dropout, one_norm=self.one_norm)


class Parallel(Block):
    """Mixer and MLP side by side: one sum instead of two."""

    def __init__(
        self, build: Build, mixers: list[Any], mlp: Any, dropout_rate: float, *, one_norm: bool
    ):
        """Adds one norm or two."""
        super().__init__(build, mixers, mlp, dropout_rate)
        self.mixer_norm = make_norm(build)
        self.mlp_norm = None if one_norm else make_norm(build)

    def wire(self, x: Array, mix: Mix, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """`x + mixer(norm(x)) + mlp(norm(x))`."""
        normed = self.mixer_norm(x)
        mixed = self.drop(mix(0, normed), ctx, 0)
        y, aux = self.run_mlp(normed if self.mlp_norm is None else self.mlp_norm(x), ctx)
        return x + mixed + y, aux
