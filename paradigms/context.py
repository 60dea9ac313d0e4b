"""What a model is told about its tokens, before and after the rows were compacted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Key

from .masks import Bounds, Causal, Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The caller's side: everything about a call beside the tokens. All fields have defaults.

    Attributes:
        valid: bool (B T), False for padding, which may stand anywhere and takes no position.
        lengths: int32 (B): instead of `valid`, when the valid tokens already come first.
        segment_ids: int32 (B T), the document of each token; tokens of different documents never
            see one another. None continues the document that the state ends with. Negative ids
            are padding like `valid=False`. Ids must not come back after another document.
        mask: what a token may look at inside its document.
        parents: int32 (B T), for a draft tree: the index in this call of each token's parent, -1
            for the tokens that follow the state directly. Parents come before their children.
        dropout_key: PRNG key; None switches dropout off.
        history: False promises that the state given holds no token yet, so that reading it can
            be left out. Static.
    """

    valid: Bool[Array, "B T"] | None = None
    lengths: Int[Array, " B"] | None = None
    segment_ids: Int[Array, "B T"] | None = None
    mask: Mask = dataclasses.field(default_factory=Causal)
    parents: Int[Array, "B T"] | None = None
    dropout_key: Key[Array, ""] | None = None
    history: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """The mixers' side, after the backbone brought every row's valid tokens to the front.

    Attributes:
        order: int32 (B T), index of a token in its row's history (start + depth).
        positions: int32 (B T), index of a token in its document: what rotary phases use.
        segment_ids: int32 (B T), negative behind the row's length.
        starts_document: bool (B T): nothing may be carried into this token from before it.
        lengths: int32 (B), valid new tokens.
        start: int32 (B), valid tokens before this call.
        bounds: the mask's vectors.
        parents: int32 (B T) or None, see `Context`.
        shared: arrays that layers hand to one another (a first embedding, shared keys): a layer
            may add to it, and the layers after it find it there.
        dropout_key: PRNG key of this layer, or None.
        begin: what each document begins with in this layer: what the mixer's `absorb` made of the
            learnt meta tokens, with a leading 1 for the batch; None without meta tokens.
        adapters: low-rank changes of this invocation to a shared block's matrices, by their names:
            (A, B) for `x W + (x A) B`; None for none.
        mask_is_causal: static; True when no token can look ahead.
        history: static, see `Context`.
    """

    order: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    starts_document: Bool[Array, "B T"]
    lengths: Int[Array, " B"]
    start: Int[Array, " B"]
    bounds: Bounds
    parents: Int[Array, "B T"] | None
    shared: dict[str, Any]
    dropout_key: Key[Array, ""] | None
    mask_is_causal: bool = dataclasses.field(metadata={"static": True})
    history: bool = dataclasses.field(metadata={"static": True})
    begin: Any = None
    adapters: dict[str, tuple[Array, Array]] | None = None

    def replace(self, **changes: Any) -> "LayerContext":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def ancestors(self) -> Bool[Array, "B T T"]:
        """(t, s) True where token s is token t or an ancestor of it in the draft tree.

        Without `parents` the tokens are a chain.
        """
        return tree_ancestors(self.parents, self.order.shape)


def tree_ancestors(
    parents: Int[Array, "B T"] | None, shape: tuple[int, int]
) -> Bool[Array, "B T T"]:
    """Ancestor-or-self matrix of trees whose parents come before their children."""
    batch, length = shape
    if parents is None:
        return jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    own = jnp.eye(length, dtype=bool)

    def add_row(t: Array, matrix: Array) -> Array:
        parent = parents[:, t]
        row = jnp.take_along_axis(matrix, jnp.maximum(parent, 0)[:, None, None], axis=1)[:, 0]
        row = jnp.where((parent >= 0)[:, None], row, False) | own[t]
        return matrix.at[:, t].set(row)

    return jax.lax.fori_loop(0, length, add_row, jnp.zeros((batch, length, length), bool))
