"""Pre-norm residual wiring: `x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

from typing import Any, Literal

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.norm import RMSNorm
from ..layers.params import Build, dropout


class PreNormConfig(Config):
    """Pre-norm wiring; has no settings."""

    name: Literal["prenorm"] = "prenorm"

    def build(self, build: Build, mixer: Any, mlp: Any, dropout_rate: float) -> "PreNorm":
        """Wires a mixer and an MLP (either may be None)."""
        return PreNorm(build, mixer, mlp, dropout_rate)


class PreNorm(nnx.Module):
    """A layer: state and verification pass through to the mixer."""

    def __init__(self, build: Build, mixer: Any, mlp: Any, dropout_rate: float):
        """Adds a norm before each part that is there."""
        self.mixer, self.mlp = mixer, mlp
        self.mixer_norm = None if mixer is None else RMSNorm(build.width, build.norm_eps)
        self.mlp_norm = None if mlp is None else RMSNorm(build.width, build.norm_eps)
        self.dropout_rate = dropout_rate

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> Any:
        """The mixer's state; an empty tuple for a layer without mixer."""
        return () if self.mixer is None else self.mixer.init_state(batch, max_len, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], state: Any, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Array]]:
        """Returns x, the state after it, and the MLP's auxiliary sums."""
        if self.mixer is not None:
            y, state = self.mixer(self.mixer_norm(x), state, ctx)
            x = x + self._dropout(y, ctx, 0)
        x, aux = self._mlp(x, ctx)
        return x, state, aux

    def verify(
        self, x: Float[Array, "B T D"], state: Any, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Looks at the tokens without keeping them; returns x and what `commit` needs."""
        pending: Any = ()
        if self.mixer is not None:
            y, pending = self.mixer.verify(self.mixer_norm(x), state, ctx)
            x = x + y
        return self._mlp(x, ctx)[0], pending

    def commit(
        self, state: Any, pending: Any, path: Int[Array, "B K"], accepted: Int[Array, " B"]
    ) -> Any:
        """Keeps the accepted tokens in the mixer's state."""
        if self.mixer is None:
            return state
        return self.mixer.commit(state, pending, path, accepted)

    def cost(self, batch: int, new_tokens: int, context: int, bytes_per_value: int) -> Cost:
        """Cost of the mixer plus that of the MLP."""
        total = Cost(0.0, 0.0, 0.0, 0.0)
        if self.mixer is not None:
            total += self.mixer.cost(batch, new_tokens, context, bytes_per_value)
        if self.mlp is not None:
            total += self.mlp.cost(batch, new_tokens)
        return total

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """The mixer's answer."""
        return None if self.mixer is None else self.mixer.supports(ctx, stateful=stateful)

    def _mlp(self, x: Array, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        if self.mlp is None:
            return x, {}
        y, aux = self.mlp(self.mlp_norm(x))
        return x + self._dropout(y, ctx, 1), aux

    def _dropout(self, y: Array, ctx: LayerContext, site: int) -> Array:
        if ctx.dropout_key is None:
            return y
        return dropout(y, self.dropout_rate, jax.random.fold_in(ctx.dropout_key, site))
