"""What a call comes down to: which positions each query sees, and a block table fit to be read."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int


class Plan(NamedTuple):
    """The numbers that implementations read. Key `s` of a row lies at `s % block` of the block
    `table[s // block]`, and a query sees it when `lo <= s <= hi`.

    Attributes:
        table: int32 (B blocks); every entry names a block of the pool, block 0 where none is
            needed.
        lo: first position that a query sees, int32 (B T); 0 where it sees none.
        hi: last position that a query sees, int32 (B T); -1 where it sees none.
        start: first position of a row that some query sees, int32 (B).
        stop: the position behind the last one that some query sees, int32 (B); 0 for none. What
            lies outside of start and stop may be unwritten memory.
    """  # noqa: D205

    table: Int[Array, "B blocks"]
    lo: Int[Array, "B T"]
    hi: Int[Array, "B T"]
    start: Int[Array, " B"]
    stop: Int[Array, " B"]


def make_plan(
    table: Int[Array, "B blocks"],
    lengths: Int[Array, " B"],
    offsets: Int[Array, " B"],
    *,
    queries: int,
    window: int | None,
    pool: int,
    block: int,
) -> tuple[Plan, Bool[Array, " B"]]:
    """Returns the plan, and which rows cannot be answered.

    Args:
        table: as the caller gave it: entries that are not needed may be anything.
        lengths: written keys of each row.
        offsets: position of each row's first query.
        queries: T.
        window: how many keys a query sees, itself included; None for all.
        pool: how many blocks the pool has.
        block: how many keys a block holds.
    """
    capacity = table.shape[1] * block
    position = offsets[:, None] + jnp.arange(queries, dtype=jnp.int32)
    real = (position >= 0) & (position < lengths[:, None])
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(position - (window - 1), 0)
    lo, hi = jnp.where(real, first, 0), jnp.where(real, position, -1)
    stop = jnp.max(hi, axis=1, initial=-1) + 1
    start = jnp.min(jnp.where(real, first, capacity), axis=1, initial=capacity)
    start = jnp.minimum(start, stop)
    begin = jnp.arange(table.shape[1], dtype=jnp.int32) * block
    needed = (begin < stop[:, None]) & (begin + block > start[:, None])
    named = (table >= 0) & (table < pool)
    wrong = jnp.any(needed & ~named, axis=1) | (lengths < 0) | (lengths > capacity)
    # A row that holds too much must not make a kernel walk past the table's end.
    stop = jnp.minimum(stop, capacity)
    table = jnp.where(needed & named, table, 0)
    return Plan(table, lo, hi, jnp.minimum(start, stop), stop), wrong


def shares(
    plan: Plan, keys: int, parts: int
) -> tuple[Int[Array, "B parts"], Int[Array, "B parts"]]:
    """Cuts the tiles of keys that a row needs into equal shares, one for each program.

    By the row's own length and not by its table's: a short row in a long table keeps every program
    busy.

    Args:
        plan: the call's.
        keys: keys of a tile; tile n begins at key n * keys.
        parts: how many programs share a row.

    Returns:
        First tile of each share, and the tile behind its last.
    """
    first = plan.start // keys
    behind = jnp.where(plan.stop > plan.start, -(-plan.stop // keys), first)
    share = -(-(behind - first) // parts)
    begin = first[:, None] + share[:, None] * jnp.arange(parts, dtype=jnp.int32)
    begin = jnp.minimum(begin, behind[:, None])
    return begin, jnp.minimum(begin + share[:, None], behind[:, None])
