"""The one rule that says which key a query sees, as integer vectors.

A key is visible to a query when both lie in the same segment and

    (q_lo <= k_order <= q_hi)  or  (q_tag == k_tag >= 0)

or when the key is pinned (an attention sink, a meta token); a `tree` matrix may narrow the first
clause further for draft trees. Causal, full, prefix and block-causal attention and the two streams
of block diffusion are settings of the vectors. A key with `k_order < 0` was never written and is
visible to nobody.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int


class AttentionMask(NamedTuple):
    """Vectors of the mask rule; kernels read these and skip blocks by their minima and maxima.

    Attributes:
        q_lo: lowest visible order, int32 (B T).
        q_hi: highest visible order, int32 (B T).
        k_order: order of each key, int32 (B S); negative where nothing was written.
        q_segment: document of each query, int32 (B T); negative for padding, which sees nothing.
        k_segment: document of each key, int32 (B S).
        q_tag: int32 (B T) or None.
        k_tag: int32 (B S) or None.
        k_pinned: bool (B S) or None; a pinned key is visible from every segment.
        tree: bool (B T S) or None; narrows the order clause.
    """

    q_lo: Int[Array, "B T"]
    q_hi: Int[Array, "B T"]
    k_order: Int[Array, "B S"]
    q_segment: Int[Array, "B T"]
    k_segment: Int[Array, "B S"]
    q_tag: Int[Array, "B T"] | None = None
    k_tag: Int[Array, "B S"] | None = None
    k_pinned: Bool[Array, "B S"] | None = None
    tree: Bool[Array, "B T S"] | None = None

    def key_is_written(self) -> Bool[Array, "B S"]:
        """True where a key holds data: the memory of the others may be anything, NaN included."""
        written = self.k_order >= 0
        return written if self.k_pinned is None else written | self.k_pinned

    def dense(self) -> Bool[Array, "B T S"]:
        """The rule, written out as a matrix."""
        order = self.k_order[:, None, :]
        visible = (self.q_lo[:, :, None] <= order) & (order <= self.q_hi[:, :, None])
        if self.tree is not None:
            visible &= self.tree
        if self.q_tag is not None and self.k_tag is not None:
            tag = self.q_tag[:, :, None]
            visible |= (tag == self.k_tag[:, None, :]) & (tag >= 0)
        visible &= self.q_segment[:, :, None] == self.k_segment[:, None, :]
        visible &= order >= 0
        if self.k_pinned is not None:
            visible |= self.k_pinned[:, None, :]
        return visible & (self.q_segment >= 0)[:, :, None]


def full_mask(batch: int, length: int) -> AttentionMask:
    """Every key visible to every query: the plainest setting, for tests and benchmarks."""
    zeros = jnp.zeros((batch, length), jnp.int32)
    order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return AttentionMask(zeros, zeros + length, order, zeros, zeros)


def causal_mask(batch: int, length: int) -> AttentionMask:
    """Key `s` visible to query `t` when `s <= t`."""
    mask = full_mask(batch, length)
    return mask._replace(q_hi=mask.k_order)
