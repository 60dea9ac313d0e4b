"""Several mixers side by side on the same input: attention heads beside state-space heads."""

from typing import Any, Literal

from jax import Array

from ..config import Config
from ..context import LayerContext
from ..layers.norm import make_norm
from ..layers.params import Build
from .block import Block, Mix, Parts


class ParallelHeadsConfig(Config):
    """Mixers side by side, then an MLP (pre-norm).

    Attributes:
        combine: `sum` adds what the mixers return (Falcon-H1, arXiv 2507.22448); `mean_of_norms`
            normalises each with a learnt scale and averages them (Hymba, arXiv 2411.13676, eq. 3).
            Hymba puts one output projection behind the average; here each mixer has its own, before
            the norm.
        multipliers: factors on what the mixers return, in order; empty for ones.
    """

    name: Literal["parallel_heads"] = "parallel_heads"
    combine: Literal["sum", "mean_of_norms"] = "sum"
    multipliers: tuple[float, ...] = ()

    def refuses(self, parts: Parts) -> str | None:
        """Two mixers or more, and as many multipliers as mixers."""
        count = len(parts.mixers)
        if count < 2:
            return f"block 'parallel_heads' needs `mixers` with at least two, got {count}"
        if self.multipliers and len(self.multipliers) != count:
            return f"block.multipliers has {len(self.multipliers)} values for {count} mixers"
        return None

    def build(self, build: Build, parts: Parts) -> "ParallelHeads":
        """Makes the layer with its parts."""
        mixers = [mixer.build(build) for mixer in parts.mixers]
        return ParallelHeads(self, build, mixers, parts.build_mlp(build), parts.dropout)


class ParallelHeads(Block):
    """`x + combine_i(mixer_i(norm(x)))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        config: ParallelHeadsConfig,
        build: Build,
        mixers: list[Any],
        mlp: Any,
        dropout_rate: float,
    ):
        """Adds the norms."""
        super().__init__(build, mixers, mlp, dropout_rate)
        self.multipliers = config.multipliers or (1.0,) * len(mixers)
        self.mixer_norm = make_norm(build)
        self.averaged = config.combine == "mean_of_norms"
        if self.averaged:
            for index in range(len(mixers)):
                setattr(self, f"out_norm_{index}", make_norm(build))
        self.mlp_norm = None if mlp is None else make_norm(build)

    def wire(self, x: Array, mix: Mix, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """All mixers see the same normed input."""
        normed = self.mixer_norm(x)
        outs = []
        for index, factor in enumerate(self.multipliers):
            y = mix(index, normed)
            if self.averaged:
                y = getattr(self, f"out_norm_{index}")(y)
            outs.append(y if factor == 1.0 else y * factor)
        mixed = sum(outs[1:], outs[0])
        if self.averaged:
            mixed = mixed / len(outs)
        x = x + self.drop(mixed, ctx, 0)
        if self.mlp_norm is None:
            return x, {}
        y, aux = self.run_mlp(self.mlp_norm(x), ctx)
        return x + y, aux
