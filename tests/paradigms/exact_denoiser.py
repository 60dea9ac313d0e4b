"""A stand-in for a trained model that knows the law of the text exactly.

The text is BOS and then n tokens of `joint`. Its answer at a hidden position is the conditional law
of that token given the visible ones, so what remains is the behaviour of the objective or sampler.
"""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from genlab.kernels.cross_entropy import cross_entropy
from genlab.paradigms.interface import Out, SpecialIds

IMPOSSIBLE = -40.0  # logit of what the law excludes
LOUD = 50.0  # logit of the mask id: its probability must be taken away, or all goes to it


@jax.tree_util.register_pytree_node_class
class ExactDenoiser:
    """Behaves as `genlab.paradigms.model.Model` does towards paradigms and decodings."""

    config = SimpleNamespace(dropout=0.0, max_len=64)
    dtype = jnp.float32

    def __init__(self, joint, shift=False):
        """`joint`: probabilities, n axes of size k; `shift`: answers come one place earlier."""
        self.joint, self.shift = joint, shift

    @property
    def specials(self):
        """BOS, EOS, PAD and MASK follow the k tokens."""
        return SpecialIds(*range(self.joint.shape[0], self.joint.shape[0] + 4))

    def __call__(self, tokens, state=None, *, ctx, collect=(), remat=False):
        """Logits of all positions in the place of hidden states."""
        k, n = self.joint.shape[0], self.joint.ndim
        outcomes = jnp.asarray(list(itertools.product(range(k), repeat=n)))
        text = tokens[:, 1 : n + 1]
        agrees = (text[:, None] == outcomes) | (text[:, None] == self.specials.mask)
        weight = jnp.where(jnp.all(agrees, axis=2), self.joint.reshape(-1), 0.0)
        chosen = jax.nn.one_hot(outcomes, k)
        law = jnp.einsum("bo,onk->bnk", weight, chosen, precision="highest")
        law /= jnp.maximum(jnp.sum(law, axis=2, keepdims=True), 1e-30)
        logits = jnp.where(law > 0, jnp.log(jnp.maximum(law, 1e-30)), IMPOSSIBLE)
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, 4)), constant_values=IMPOSSIBLE)
        logits = logits.at[:, :, self.specials.mask].set(LOUD)
        before = 0 if self.shift else 1
        after = tokens.shape[1] - n - before
        logits = jnp.pad(logits, ((0, 0), (before, after), (0, 0)))
        return Out(logits, {}, {}), None

    def head(self, hidden):
        """The identity."""
        return hidden

    def nll(self, hidden, targets, *, banned=None):
        """By the kernels' reference: the head is the identity."""
        eye = jnp.eye(hidden.shape[-1])
        allowed = None if banned is None else jnp.arange(hidden.shape[-1]) != banned
        flat = hidden.reshape(-1, hidden.shape[-1])
        losses = cross_entropy(
            flat, eye, targets.reshape(-1), allowed=allowed, implementation="reference"
        )
        return tuple(loss.reshape(targets.shape) for loss in losses)

    def weighted_nll(self, hidden, targets, token_weight, *, banned=None):
        """The weighted sum of `nll`."""
        return jnp.sum(token_weight * self.nll(hidden, targets, banned=banned)[0])

    def tree_flatten(self):
        """The law is a leaf."""
        return (self.joint,), self.shift

    @classmethod
    def tree_unflatten(cls, shift, leaves):
        """Inverse of `tree_flatten`."""
        return cls(leaves[0], shift)


def random_joint(k, n, seed=0):
    """A law without zeros."""
    p = np.random.default_rng(seed).gamma(0.5, size=(k,) * n) + 1e-3
    return jnp.asarray(p / p.sum(), jnp.float32)


TIED_BITS = np.array([[0.5, 0.0], [0.0, 0.5]], np.float32)

