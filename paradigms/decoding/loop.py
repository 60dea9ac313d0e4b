"""Runs any decoding for a number of steps in one compiled loop."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...errors import ConfigError
from ..model import Model
from .state import DecodeState, Decoding


def advance(model: Model, decoding: Decoding, state: DecodeState, n: int) -> DecodeState:
    """Takes at most `n` steps; stops early when every row is done.

    The text does not depend on how steps are divided among calls. The buffers of `state` are taken
    over: the state given must not be used again.

    Args:
        model: the model that `decoding.start` was given.
        decoding: static.
        state: from `start` or from here.
        n: steps; data, so that another number compiles nothing.

    Raises:
        ConfigError: `n` is negative or no whole number.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise ConfigError(f"n: got {n!r}, want a whole number of steps, at least 0")
    return _advance(model, state, np.int32(min(int(n), np.iinfo(np.int32).max)), decoding=decoding)


def finished(state: DecodeState) -> bool:
    """True when every row is done. Waits for the device."""
    return bool(np.asarray(state.done).all())


@partial(jax.jit, static_argnames=("decoding",), donate_argnames=("state",))
def _advance(model: Model, state: DecodeState, n: Array, *, decoding: Decoding) -> DecodeState:
    def unfinished(carry: tuple[Array, DecodeState]) -> Array:
        count, state = carry
        return (count < n) & ~jnp.all(state.done)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        count, state = carry
        return count + 1, decoding.step(model, state)

    return jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))[1]
