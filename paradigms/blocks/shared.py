"""A block whose weights several layers share, on the hidden state beside the first embedding."""

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import Field

from ..config import Config
from ..context import LayerContext
from ..layers.linear import linear
from ..layers.norm import make_norm
from ..layers.params import Build, count_params, shape_of
from .block import Block, Mix, Parts

FIRST = "first_embedding"


class SharedConfig(Config):
    """A shared attention and MLP before a layer's own mixer: Zamba and Zamba2.

    The first of `mixers` and the `mlp` are shared by all layers of this kind; a second mixer, if
    there is one, is each layer's own. With e the embedding of the token (arXiv 2405.16712, sec. 3):

        s = mlp(norm(mixer_0(norm([x, e]))))        shared, no residual inside
        x = x + mixer_1(norm(x + s W))              W and mixer_1 are the layer's own

    Without an own mixer it is `x = x + s W`. The state is per invocation, as in the papers.

    Attributes:
        lora_rank: rank of each layer's own change to the shared matrices named in `lora` (Zamba2,
            arXiv 2411.15242, sec. 2); null for none.
        lora: names of shared matrices, of the attention (w_q, w_k, w_v, w_o) or of the MLP
            (w_gate, w_up, w_down).
        lora_joined: the changes to w_gate and w_up have one first matrix, as published.
    """

    name: Literal["shared"] = "shared"
    lora_rank: int | None = Field(default=None, ge=1)
    lora: tuple[str, ...] = ("w_gate", "w_up")
    lora_joined: bool = False

    def refuses(self, parts: Parts) -> str | None:
        """One or two mixers, the first of them one that reads any width, and an MLP."""
        if not 1 <= len(parts.mixers) <= 2 or parts.mlp is None:
            return (
                f"block 'shared' needs an mlp and one or two mixers, got {len(parts.mixers)} "
                f"and {'no mlp' if parts.mlp is None else 'an mlp'}"
            )
        if parts.mixers[0].name != "attention":
            return (
                "block 'shared' puts [hidden, embedding] into its first mixer, which must be "
                f"attention, not {parts.mixers[0].name}"
            )
        if self.lora_rank is not None and not self.lora:
            return "block.lora_rank is set, but block.lora names no matrix"
        both = self.lora_rank is not None and {"w_gate", "w_up"}.issubset(self.lora)
        if self.lora_joined and not both:
            return "block.lora_joined needs lora_rank, and w_gate and w_up in lora"
        return None

    def build(self, build: Build, parts: Parts) -> "SharedOwn":
        """Makes what is one layer's own; `build_shared` makes the rest, once."""
        return SharedOwn(self, build, parts)

    def build_shared(self, build: Build, parts: Parts) -> "SharedWeights":
        """Makes the part that all layers of the kind share."""
        return SharedWeights(build, parts)


class SharedWeights(nnx.Module):
    """The shared attention, MLP and norms."""

    def __init__(self, build: Build, parts: Parts):
        """Builds the attention for inputs of width 2 D."""
        self.input_norm = make_norm(build, 2 * build.width)
        self.mixer = parts.mixers[0].build(build._replace(input_width=2 * build.width))
        self.mlp_norm = make_norm(build)
        self.mlp = parts.mlp.build(build)


class SharedOwn(nnx.Module):
    """What one invocation has for itself: a projection, adapters, and perhaps a mixer."""

    def __init__(self, config: SharedConfig, build: Build, parts: Parts):
        """The second matrix of each adapter begins at zero, so that all invocations begin equal."""
        self.w_link = build.matrix(build.width, build.width, residual=True)
        has_own = len(parts.mixers) == 2
        self.mixer = parts.mixers[1].build(build) if has_own else None
        self.mixer_norm = make_norm(build) if has_own else None
        self.dropout_rate = parts.dropout
        self.lora = () if config.lora_rank is None else config.lora
        self.joined = config.lora_joined
        if self.lora:
            # The shapes of the shared matrices, without making them.
            shapes = nnx.eval_shape(
                lambda: SharedWeights(build._replace(rngs=nnx.Rngs(0)), parts)
            )
            for name in self.lora:
                owner = next(
                    (p for p in (shapes.mixer, shapes.mlp) if name in getattr(p, "adaptable", ())),
                    None,
                )
                if owner is None:
                    known = [*getattr(shapes.mixer, "adaptable", ())]
                    known += getattr(shapes.mlp, "adaptable", ())
                    raise ValueError(f"block.lora: no shared matrix {name!r} among {known}")
                rows, columns = shape_of(getattr(owner, name))
                if self._first(name) == name:
                    setattr(self, f"{name}_down", build.matrix(rows, config.lora_rank))
                zeros = jnp.zeros((config.lora_rank, columns), jnp.float32)
                setattr(self, f"{name}_up", nnx.Param(zeros))

    def using(self, shared: SharedWeights) -> "Shared":
        """The whole layer."""
        return Shared(self, shared)

    def adapters(self) -> dict[str, tuple[Array, Array]] | None:
        """The low-rank changes by the names of the matrices."""
        if not self.lora:
            return None
        return {
            name: (
                getattr(self, f"{self._first(name)}_down")[...],
                getattr(self, f"{name}_up")[...],
            )
            for name in self.lora
        }

    def _first(self, name: str) -> str:
        """Under whose name the first matrix of a change is held."""
        return "w_gate" if self.joined and name == "w_up" else name


class Shared(Block):
    """An invocation of the shared block: its state is of its own mixers' calls."""

    def __init__(self, own: SharedOwn, shared: SharedWeights):
        """Joins what is shared and what is not; holds no parameters beside."""
        self.own, self.shared = own, shared
        self.names = ("shared_mixer",) if own.mixer is None else ("shared_mixer", "own_mixer")
        self.shared_mixer, self.own_mixer = shared.mixer, own.mixer
        self.mlp = shared.mlp
        self.dropout_rate = own.dropout_rate

    def wire(self, x: Array, mix: Mix, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """See `SharedConfig`."""
        wide = jnp.concatenate([x, ctx.shared[FIRST].astype(x.dtype)], axis=-1)
        s = mix(0, self.shared.input_norm(wide))
        adapted = ctx.replace(adapters=self.own.adapters())
        s, aux = self.run_mlp(self.shared.mlp_norm(s), adapted)
        link = linear(s, self.own.w_link[...]).astype(x.dtype)
        if self.own.mixer is None:
            return x + link, aux
        return x + self.drop(mix(1, self.own.mixer_norm(x + link)), ctx, 0), aux

    def own_params(self) -> int:
        """Parameters of this invocation alone."""
        return count_params(self.own)

    def _own(self, ctx: LayerContext, index: int) -> LayerContext:
        ctx = super()._own(ctx, index)
        return ctx.replace(adapters=self.own.adapters()) if index == 0 else ctx
