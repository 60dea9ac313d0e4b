"""What all blocks share: state, verification and cost pass through to the mixers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from ...errors import ConfigError
from ..context import LayerContext
from ..interface import Cost
from ..layers.params import Build, dropout, weight_bytes

Mix = Callable[[int, Array], Array]


class Parts(NamedTuple):
    """The configurations of a layer's parts, as the YAML gives them.

    Attributes:
        mixers: in order; empty for a layer that does not mix time.
        mlp: or None.
        dropout: rate on what each part adds.
    """

    mixers: tuple[Any, ...]
    mlp: Any
    dropout: float

    def build_mlp(self, build: Build) -> Any:
        """Makes the MLP, None where there is none."""
        return None if self.mlp is None else self.mlp.build(build)


def refuse_several(kind: str, parts: Parts) -> str | None:
    """The reason why a block of one mixer cannot take these parts."""
    if len(parts.mixers) <= 1:
        return None
    names = ", ".join(mixer.name for mixer in parts.mixers)
    return f"block {kind!r} takes one mixer, got {len(parts.mixers)} ({names})"


class Block(nnx.Module):
    """A layer. A kind of block makes its norms and says in `wire` how the parts are wired.

    Its state is that of its mixer; with several mixers, a tuple of theirs.
    """

    def __init__(self, build: Build, mixers: list[Any], mlp: Any, dropout_rate: float):
        """Takes the parts over."""
        del build
        several = tuple(f"mixer_{index}" for index in range(len(mixers)))
        self.names = ("mixer",) if len(mixers) == 1 else several
        for name, mixer in zip(self.names, mixers, strict=True):
            setattr(self, name, mixer)
        self.mlp = mlp
        self.dropout_rate = dropout_rate

    @property
    def mixers(self) -> list[Any]:
        """The mixers in order."""
        return [getattr(self, name) for name in self.names]

    def wire(self, x: Array, mix: Mix, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """Returns the layer's output and its losses and statistics.

        `mix(i, h)` runs mixer i on h, once; the rest is the block's own business.
        """
        raise NotImplementedError

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> Any:
        """The mixers' states; an empty tuple for a layer without mixer."""
        states = [mixer.init_state(batch, max_len, dtype=dtype) for mixer in self.mixers]
        return _joined(states)

    def __call__(
        self, x: Float[Array, "B T D"], state: Any, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Array]]:
        """Returns x, the state after it, and losses and statistics."""
        states = self._split(state)
        new = list(states)

        def mix(index: int, h: Array) -> Array:
            mixer = getattr(self, self.names[index])
            y, new[index] = mixer(h, states[index], self._own(ctx, index))
            return y

        x, aux = self.wire(x, mix, ctx)
        return x, None if state is None else _joined(new), aux

    def verify(
        self, x: Float[Array, "B T D"], state: Any, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Looks at the tokens without keeping them; returns x and what `commit` needs."""
        states = self._split(state)
        pending: list[Any] = [()] * len(states)

        def mix(index: int, h: Array) -> Array:
            mixer = getattr(self, self.names[index])
            y, pending[index] = mixer.verify(h, states[index], self._own(ctx, index))
            return y

        return self.wire(x, mix, ctx)[0], _joined(pending)

    def absorb(
        self, x: Float[Array, "1 M D"], ctx: LayerContext
    ) -> tuple[Float[Array, "1 M D"], Any]:
        """Runs the layer over meta tokens; returns x and what documents begin with here."""
        begin: list[Any] = [None] * len(self.mixers)

        def mix(index: int, h: Array) -> Array:
            mixer = getattr(self, self.names[index])
            if not hasattr(mixer, "absorb"):
                kind = type(mixer).__name__
                raise ConfigError(f"model.meta_tokens: mixer {kind} cannot begin from meta tokens")
            y, begin[index] = mixer.absorb(h, ctx)
            return y

        return self.wire(x, mix, ctx)[0], _joined(begin)

    def commit(
        self, state: Any, pending: Any, path: Int[Array, "B K"], accepted: Int[Array, " B"]
    ) -> Any:
        """Keeps the accepted tokens in the mixers' states."""
        kept = [
            mixer.commit(own, held, path, accepted)
            for mixer, own, held in zip(
                self.mixers, self._split(state), self._split(pending), strict=True
            )
        ]
        return _joined(kept)

    def cost_parts(
        self, batch: int, new_tokens: int, context: int, bytes_per_value: int
    ) -> dict[str, Cost]:
        """Cost by part: mixers and MLP by their classes' names, "other" for norms and the like.

        Each comes with the bytes of the parameters that it reads.
        """
        parts: dict[str, Cost] = {}

        def add(part: Any, cost: Cost, read: float) -> None:
            cost = cost._replace(weight_bytes=read)
            name = type(part).__name__
            parts[name] = parts[name] + cost if name in parts else cost

        rest = weight_bytes(self, bytes_per_value)
        for mixer in self.mixers:
            size = weight_bytes(mixer, bytes_per_value)
            add(mixer, mixer.cost(batch, new_tokens, context, bytes_per_value), size)
            rest -= size
        if self.mlp is not None:
            size = read = weight_bytes(self.mlp, bytes_per_value)
            if hasattr(self.mlp, "weight_bytes"):
                read = self.mlp.weight_bytes(batch * new_tokens, bytes_per_value)
            add(self.mlp, self.mlp.cost(batch, new_tokens), read)
            rest -= size
        return parts | {"other": Cost(0.0, 0.0, 0.0, 0.0, rest)}

    def inactive_params(self) -> int:
        """Parameters that one token does not use."""
        return self.mlp.inactive_params() if hasattr(self.mlp, "inactive_params") else 0

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """The first reason that a mixer gives why it cannot honour `ctx`."""
        for mixer in self.mixers:
            reason = mixer.supports(ctx, stateful=stateful)
            if reason is not None:
                return reason
        return None

    def run_mlp(self, h: Array, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """What the MLP adds for the normed input h, after dropout."""
        y, aux = self.mlp(h, ctx)
        return self.drop(y, ctx, 1), aux

    def drop(self, y: Array, ctx: LayerContext, site: int) -> Array:
        """Dropout on what a part adds; parts have different sites."""
        if ctx.dropout_key is None:
            return y
        return dropout(y, self.dropout_rate, jax.random.fold_in(ctx.dropout_key, site))

    def _split(self, state: Any) -> tuple[Any, ...]:
        """One state per mixer."""
        count = len(self.mixers)
        if state is None:
            return (None,) * count
        if count == 1:
            return (state,)
        return tuple(state)

    def _own(self, ctx: LayerContext, index: int) -> LayerContext:
        if ctx.begin is None or len(self.mixers) == 1:
            return ctx
        return ctx.replace(begin=ctx.begin[index])


def _joined(states: list[Any]) -> Any:
    """The state itself of a single mixer, else a tuple."""
    return states[0] if len(states) == 1 else tuple(states)
