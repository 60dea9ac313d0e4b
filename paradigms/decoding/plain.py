"""Plain autoregressive decoding: one token per model call."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from ...errors import ConfigError
from ..config import Config
from ..context import Context
from ..interface import Paradigm, SpecialIds
from ..model import Model
from .prefill import prefill
from .sampling import Purpose, Sampling, draw, non_finite
from .state import DecodeState, Request, check_request, fresh_state


class PlainConfig(Config):
    """One token per model call; has no settings."""

    name: Literal["plain"] = "plain"

    def build(self, specials: SpecialIds, paradigm: Paradigm) -> "Plain":
        """Makes the decoding.

        Raises:
            ConfigError: the paradigm does not predict the next token.
        """
        del specials
        if paradigm.name != "autoregressive":
            raise ConfigError(
                f"decoding 'plain' needs an autoregressive model, this one is {paradigm.name}"
            )
        return Plain()


@dataclasses.dataclass(frozen=True)
class Plain:
    """Prefill, then one token per step, for any causal model: its state is never looked into.

    `start` takes the prompt in and draws the first token; each step feeds the last token and draws
    the next. A stop id ends its row and is itself written. `cursor` is the place of the next token.
    """

    name: ClassVar[str] = "plain"
    uses_steps: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    one_token: ClassVar[bool] = True

    def start(
        self,
        model: Model,
        prompt: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        sampling: Sampling,
        seeds: ArrayLike,
        max_new: ArrayLike,
        max_len: int,
    ) -> DecodeState:
        """Takes the prompt in and draws the first token; see `Decoding.start`."""
        request = check_request(
            model,
            prompt,
            valid=valid,
            lengths=lengths,
            sampling=sampling,
            seeds=seeds,
            max_new=max_new,
            max_len=max_len,
        )
        if np.any(np.asarray(sampling.steps) != 0):
            raise ConfigError(
                f"steps: got {int(np.max(sampling.steps))}, but decoding 'plain' always makes one "
                "model call per token; leave it out"
            )
        return _start(model, request, max_len=max_len)

    def step(self, model: Model, state: DecodeState) -> DecodeState:
        """Feeds every live row's last token and draws the next."""
        live = ~state.done
        last = jnp.take_along_axis(state.tokens, state.cursor[:, None] - 1, axis=1)
        # Length 0 leaves the memory of a finished row as it is.
        ctx = Context(lengths=live.astype(jnp.int32))
        out, model_state = model(last, state.model_state, ctx=ctx)
        return _emit(model, state._replace(model_state=model_state), out.hidden[:, 0], 1)

    def settled(self, state: DecodeState) -> Int[Array, " B"]:
        """A token that was drawn stays."""
        return state.cursor

    def first_output(self, max_new: int) -> int:
        """The first token stands by itself."""
        return min(1, max_new)

    def options(self) -> dict[str, Any]:
        """There are none."""
        return {}


@partial(jax.jit, static_argnames=("max_len",))
def _start(model: Model, request: Request, *, max_len: int) -> DecodeState:
    tokens, lengths = jnp.asarray(request.tokens), jnp.asarray(request.lengths)
    hidden, memory = prefill(model, tokens, lengths, max_len)
    state = fresh_state(request, max_len, model_state=memory)
    state = _emit(model, state, hidden, lengths)
    # The call was made for rows that wanted no token, too.
    idle = jnp.asarray(request.max_new) <= 0
    return state._replace(
        nfe=jnp.where(idle, 1, state.nfe),
        token_evals=jnp.where(idle, lengths, state.token_evals),
    )


def _emit(
    model: Model, state: DecodeState, hidden: Float[Array, "B D"], evaluated: Int[Array, " B"] | int
) -> DecodeState:
    """Draws each live row's next token from the model's last hidden state and writes it."""
    logits = model.head(hidden)
    live, cursor = ~state.done, state.cursor
    broken = live & non_finite(logits)
    writes = live & ~broken
    drawn = draw(logits, state.row_keys, cursor, Purpose.TOKEN, state.sampling)
    rows = jnp.arange(cursor.shape[0])
    place = jnp.where(writes, cursor, state.tokens.shape[1])
    cursor = jnp.where(writes, cursor + 1, cursor)
    stops = jnp.any(drawn[:, None] == state.sampling.stop_ids[None], axis=1)
    return state._replace(
        tokens=state.tokens.at[rows, place].set(drawn, mode="drop"),
        known=state.known.at[rows, place].set(True, mode="drop"),
        cursor=cursor,
        nfe=jnp.where(live, state.nfe + 1, state.nfe),
        token_evals=jnp.where(live, state.token_evals + evaluated, state.token_evals),
        done=state.done | broken | (writes & stops) | (cursor >= state.limit),
        failed_at=jnp.where(broken, state.cursor, state.failed_at),
    )
