"""A stand-in for a trained model that continues a prompt by a script, through the state alone."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from genlab.paradigms.interface import Out

LOUD = 60.0  # the scripted id's logit; the others have 0


class Memory(NamedTuple):
    """Which script a row follows, and how many tokens it took in beside the prompt."""

    script: jax.Array
    count: jax.Array


@jax.tree_util.register_pytree_node_class
class ScriptedModel:
    """After a prompt whose second token is r, says `scripts[r]` id by id, then starts over.

    A prompt of one token follows script 0. The logits are NaN where the script says -1.
    """

    dtype = jnp.float32

    def __init__(self, scripts, vocab_size, max_len=64, quiet=0.0):
        """`scripts`: int32 (R L); `quiet`: logit of the ids that are not scripted."""
        self.scripts, self.static = scripts, (vocab_size, max_len, quiet)

    @property
    def config(self):
        """What decodings ask a model's configuration for."""
        vocab_size, max_len, _ = self.static
        return SimpleNamespace(
            vocab_size=vocab_size, padded_vocab_size=vocab_size, max_len=max_len
        )

    def init_state(self, batch, max_len, *, dtype=None):
        """Nothing read yet."""
        return Memory(jnp.zeros((batch,), jnp.int32), jnp.full((batch,), -1, jnp.int32))

    def __call__(self, tokens, state, *, ctx):
        """The prompt in one call, then one token a call; rows of length 0 stay as they are."""
        reads = ctx.lengths > 0
        script = state.script
        if not ctx.history:
            second = tokens[:, 1] if tokens.shape[1] > 1 else tokens[:, 0] * 0
            second = jnp.where(ctx.lengths > 1, second, 0)
            script = jnp.clip(second, 0, self.scripts.shape[0] - 1)
        count = jnp.where(reads, state.count + 1, state.count)
        says = self.scripts[script, count % self.scripts.shape[1]]
        vocab_size, _, quiet = self.static
        logits = jnp.where(jnp.arange(vocab_size)[None] == says[:, None], LOUD, quiet)
        logits = jnp.where(says[:, None] < 0, jnp.nan, logits)
        hidden = jnp.broadcast_to(logits[:, None], (*tokens.shape, vocab_size))
        return Out(hidden, {}, {}), Memory(script, count)

    def head(self, hidden):
        """The identity."""
        return hidden

    def tree_flatten(self):
        """The scripts are data, so that models share compiled programs."""
        return (self.scripts,), self.static

    @classmethod
    def tree_unflatten(cls, static, leaves):
        """Inverse of `tree_flatten`."""
        return cls(leaves[0], *static)
