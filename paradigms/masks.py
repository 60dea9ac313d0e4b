"""What a new token may look at, as the caller states it: turned into the kernels' vectors.

Orders count the valid tokens of a row from 0 over its whole history. A mask gives, for each new
token of order `o`, the closed interval of orders it sees and optional tags; documents (segments)
are separated by the rule itself (see `genlab.kernels.attention.mask`).
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

EVERYTHING = 2**30  # an order beyond any length


class Bounds(NamedTuple):
    """Interval of visible orders and tags per new token, each int32 (B T); tags may be None."""

    q_lo: Int[Array, "B T"]
    q_hi: Int[Array, "B T"]
    q_tag: Int[Array, "B T"] | None = None
    k_tag: Int[Array, "B T"] | None = None


class Mask(Protocol):
    """A mask is a pytree with this method and this class attribute."""

    is_causal: bool

    def bounds(self, order: Int[Array, "B T"]) -> Bounds:
        """Returns the interval that each new token sees, given its order."""
        ...

    def rearranged(self, source: Int[Array, "B T"]) -> "Mask":
        """Returns the mask after the caller's tokens were brought into the order `source`."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Causal:
    """Each token sees itself and what came before it."""

    is_causal = True

    def bounds(self, order: Int[Array, "B T"]) -> Bounds:
        """0 <= k_order <= order."""
        return Bounds(jnp.zeros_like(order), order)

    def rearranged(self, source: Int[Array, "B T"]) -> "Causal":
        """Nothing here depends on the caller's order."""
        del source
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Full:
    """Each token sees every token of its document."""

    is_causal = False

    def bounds(self, order: Int[Array, "B T"]) -> Bounds:
        """Every order."""
        return Bounds(jnp.zeros_like(order), jnp.full_like(order, EVERYTHING))

    def rearranged(self, source: Int[Array, "B T"]) -> "Full":
        """Nothing here depends on the caller's order."""
        del source
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """The first `length` tokens of a row see one another; the rest is causal.

    Attributes:
        length: int32 (B).
    """

    length: Int[Array, " B"]
    is_causal = False

    def bounds(self, order: Int[Array, "B T"]) -> Bounds:
        """0 <= k_order <= max(order, length - 1)."""
        return Bounds(jnp.zeros_like(order), jnp.maximum(order, self.length[:, None] - 1))

    def rearranged(self, source: Int[Array, "B T"]) -> "Prefix":
        """Nothing here depends on the caller's order."""
        del source
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCausal:
    """Blocks of `size` tokens see themselves whole and all blocks before them.

    Attributes:
        size: tokens in a block.
        first: int32 (B): the order at which the blocks begin; what lies before is one block.
    """

    size: int = dataclasses.field(metadata={"static": True})
    first: Int[Array, " B"] | None = None
    is_causal = False

    def bounds(self, order: Int[Array, "B T"]) -> Bounds:
        """0 <= k_order <= last order of the own block."""
        first = 0 if self.first is None else self.first[:, None]
        last = first + ((order - first) // self.size + 1) * self.size - 1
        return Bounds(jnp.zeros_like(order), jnp.where(order < first, first - 1, last))

    def rearranged(self, source: Int[Array, "B T"]) -> "BlockCausal":
        """Nothing here depends on the caller's order."""
        del source
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Vectors:
    """The rule's vectors, given outright for this call's tokens (the two streams of BD3-LM).

    Attributes:
        q_lo, q_hi: int32 (B T), orders.
        q_tag, k_tag: int32 (B T) or None.
    """

    q_lo: Int[Array, "B T"]
    q_hi: Int[Array, "B T"]
    q_tag: Int[Array, "B T"] | None = None
    k_tag: Int[Array, "B T"] | None = None
    is_causal = False

    def bounds(self, order: Int[Array, "B T"]) -> Bounds:
        """The vectors themselves."""
        del order
        return Bounds(self.q_lo, self.q_hi, self.q_tag, self.k_tag)

    def rearranged(self, source: Int[Array, "B T"]) -> "Vectors":
        """Every vector follows its token."""
        return jax.tree.map(lambda a: jnp.take_along_axis(a, source, axis=1), self)
