"""The mask rule in the form that the Pallas kernels read.

The G query heads of a key/value head are laid out as rows of one longer query, R = T G, so that a
kernel knows one head at a time, reads each block of keys once for all G, and sums their
gradients by itself. Each row has four integers and each key five; blocks of rows and of keys have
eight bounds each, by which a kernel skips a block in which no key can be visible and spares the
rule where every key is.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from ..pallas_common import pad_axis
from .mask import AttentionMask

_TOP = 2**31 - 1
# Tags that equal no other: a row or a key without one.
_NO_QUERY_TAG, _NO_KEY_TAG = -2, -1

# Order of the integers of a row, of a key, and of the bounds of a block of each.
ROW_FIELDS = ("lo", "hi", "segment", "tag")
KEY_FIELDS = ("order", "segment", "tag", "pinned", "written")
BOUNDS = 8


class Clauses(NamedTuple):
    """Which optional parts of the rule a mask has; static."""

    tags: bool
    pinned: bool
    tree: bool


class MaskRows(NamedTuple):
    """The rule, padded to whole blocks.

    Attributes:
        rows: int32 (B R 4), `ROW_FIELDS`; a row of padding sees nothing.
        keys: int32 (B 5 S), `KEY_FIELDS`; nobody sees a key of padding.
        tree: int32 (B R S) or None; 0 takes a key out of the order clause.
    """

    rows: Int[Array, "B R 4"]
    keys: Int[Array, "B 5 S"]
    tree: Int[Array, "B R S"] | None


def clauses_of(mask: AttentionMask) -> Clauses:
    """Returns the optional parts that `mask` has."""
    tags = mask.q_tag is not None and mask.k_tag is not None
    return Clauses(tags, mask.k_pinned is not None, mask.tree is not None)


def mask_rows(mask: AttentionMask, groups: int, rows: int, keys: int) -> MaskRows:
    """Writes `mask` for kernels.

    Args:
        mask: the rule.
        groups: G, the rows that a query becomes, next to each other.
        rows: R, at least T G; what is more sees nothing.
        keys: at least S; what is more is seen by nobody.
    """
    tags, pinned, tree = clauses_of(mask)
    real = mask.q_segment >= 0
    written = mask.k_order >= 0
    by_row = (
        (jnp.where(real, jnp.maximum(mask.q_lo, 0), _TOP), _TOP),
        (jnp.where(real, mask.q_hi, -1), -1),
        (mask.q_segment, -1),
        (
            jnp.where(real & (mask.q_tag >= 0), mask.q_tag, _NO_QUERY_TAG)
            if tags
            else jnp.full_like(mask.q_segment, _NO_QUERY_TAG),
            _NO_QUERY_TAG,
        ),
    )
    by_key = (
        (mask.k_order, -1),
        (mask.k_segment, -1),
        (
            jnp.where(written & (mask.k_tag >= 0), mask.k_tag, _NO_KEY_TAG)
            if tags
            else jnp.full_like(mask.k_segment, _NO_KEY_TAG),
            _NO_KEY_TAG,
        ),
        (mask.k_pinned if pinned else jnp.zeros_like(written), 0),
        (mask.key_is_written(), 0),
    )
    row_columns = [
        pad_axis(jnp.repeat(v.astype(jnp.int32), groups, axis=1), 1, rows, fill)
        for v, fill in by_row
    ]
    key_lines = [pad_axis(v.astype(jnp.int32), 1, keys, fill) for v, fill in by_key]
    matrix = None
    if tree:
        matrix = jnp.repeat(mask.tree.astype(jnp.int32), groups, axis=1)
        matrix = pad_axis(pad_axis(matrix, 1, rows), 2, keys)
    return MaskRows(jnp.stack(row_columns, axis=2), jnp.stack(key_lines, axis=1), matrix)


def visible(clauses: Clauses, row, key, tree=None) -> Bool[Array, "rows keys"]:
    """The rule, for the values of a block.

    Args:
        clauses: the optional parts.
        row: function from a name of `ROW_FIELDS` to its values, (rows, 1) or broadcast.
        key: function from a name of `KEY_FIELDS` to its values, (1, keys) or broadcast.
        tree: (rows, keys) integers, where there is a tree.
    """
    order = key("order")
    seen = (row("lo") <= order) & (order <= row("hi"))
    if clauses.tree:
        seen &= tree != 0
    if clauses.tags:
        seen |= row("tag") == key("tag")
    seen &= row("segment") == key("segment")
    if clauses.pinned:
        seen |= (key("pinned") != 0) & (row("segment") >= 0)
    return seen


def row_bounds(rows: Int[Array, "B R 4"], block: int) -> Int[Array, "B blocks 8"]:
    """Bounds of each block: lo min and max, hi min and max, segments, tags; of real rows only.

    Except for the greatest lo, which is the top where the block has a row of padding: no key
    satisfies it, so that the block is never taken for one that sees everything.
    """
    batch = rows.shape[0]
    lo, hi, segment, tag = jnp.moveaxis(rows.reshape(batch, -1, block, 4), 3, 0)
    real, tagged = segment >= 0, tag >= 0
    return jnp.stack(
        (
            lo.min(2),
            lo.max(2),
            hi.min(2),
            hi.max(2),
            jnp.where(real, segment, _TOP).min(2),
            jnp.where(real, segment, -1).max(2),
            jnp.where(tagged, tag, _TOP).min(2),
            jnp.where(tagged, tag, -1).max(2),
        ),
        axis=2,
    )


def key_bounds(keys: Int[Array, "B 5 S"], block: int) -> Int[Array, "B blocks 8"]:
    """Bounds of each block: the lowest order of all, order min and max of written keys, segments
    and tags of those, and whether a key is pinned.
    """  # noqa: D205
    batch, fields, _ = keys.shape
    order, segment, tag, pinned, _ = jnp.moveaxis(keys.reshape(batch, fields, -1, block), 1, 0)
    written, tagged = order >= 0, tag >= 0
    return jnp.stack(
        (
            order.min(2),
            jnp.where(written, order, _TOP).min(2),
            order.max(2),
            jnp.where(written, segment, _TOP).min(2),
            jnp.where(written, segment, -_TOP).max(2),
            jnp.where(tagged, tag, _TOP).min(2),
            jnp.where(tagged, tag, -1).max(2),
            pinned.max(2),
        ),
        axis=2,
    )


def may_see(q, k):
    """Whether a row of a block may see a key of a block, by their bounds.

    Args:
        q: the eight bounds of the rows, a sequence of integers (arrays broadcast).
        k: those of the keys.
    """
    lo_min, _, _, hi_max, segment_min, segment_max, tag_min, tag_max = q
    _, order_min, order_max, k_segment_min, k_segment_max, k_tag_min, k_tag_max, pinned = k
    seen = (lo_min <= order_max) & (order_min <= hi_max)
    seen |= (tag_min <= k_tag_max) & (k_tag_min <= tag_max)
    seen &= (segment_min <= k_segment_max) & (k_segment_min <= segment_max)
    return (seen | (pinned != 0)) & (segment_max >= 0)


def sees_all(q, k):
    """Whether every row of a block sees every key of a block, by their bounds, without a tree."""
    _, lo_max, hi_min, _, segment_min, segment_max, _, _ = q
    order_low, _, order_max, k_segment_min, k_segment_max, _, _, _ = k
    seen = (lo_max <= order_low) & (order_max <= hi_min)
    same = (segment_min == segment_max) & (k_segment_min == k_segment_max)
    return seen & same & (segment_min == k_segment_min)


def spans(
    q_bounds: Int[Array, "B q 8"], k_bounds: Int[Array, "B k 8"], splits: int = 1
) -> tuple[Int[Array, "B splits q"], Int[Array, "B splits q"]]:
    """First and last block of keys that a block of rows may see, in each of `splits` equal parts.

    Blocks are counted from the part's own start; (0, -1) where there is none.
    """
    q, k = jnp.moveaxis(q_bounds, 2, 0), jnp.moveaxis(k_bounds, 2, 0)
    seen = may_see([v[:, :, None] for v in q], [v[:, None, :] for v in k])
    return span_of(seen.reshape(*seen.shape[:2], splits, -1).swapaxes(1, 2))


def span_of(seen: Bool[Array, "... n"]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """First and last True along the last axis; (0, -1) where there is none."""
    count = seen.shape[-1]
    some = jnp.any(seen, axis=-1)
    first = jnp.argmax(seen, axis=-1).astype(jnp.int32)
    last = count - 1 - jnp.argmax(seen[..., ::-1], axis=-1).astype(jnp.int32)
    return first, jnp.where(some, last, -1)


def block_lists(
    row_bounds: Int[Array, "B q 8"],
    key_bounds: Int[Array, "B k 8"],
    *,
    tree: bool,
    splits: int = 1,
    by_key: bool = False,
) -> tuple[Int[Array, "B splits q k"], Int[Array, "B splits q 2"]]:
    """Which blocks of keys a kernel visits for each block of rows, in each part of the keys.

    Args:
        row_bounds: from `row_bounds`.
        key_bounds: from `key_bounds`.
        tree: whether the mask has one; then no block is free of the rule.
        splits: into how many equal parts the keys are cut.
        by_key: lists blocks of rows for each block of keys instead.

    Returns:
        Blocks, those first in which every row sees every key, then those where the rule decides;
        each as 2 n + hole, with n its number and hole 1 where some key was not written. And how
        many there are of the first kind, and of both.
    """
    q, k = jnp.moveaxis(row_bounds, 2, 0)[..., None], jnp.moveaxis(key_bounds, 2, 0)[:, :, None]
    seen = may_see(q, k)
    every = jnp.zeros_like(seen) if tree else seen & sees_all(q, k)
    kind = jnp.where(every, 0, jnp.where(seen, 1, 2)).astype(jnp.int32)
    hole = jnp.broadcast_to((key_bounds[:, None, :, 0] < 0).astype(jnp.int32), kind.shape)
    if by_key:
        kind, hole = kind.swapaxes(1, 2), hole.swapaxes(1, 2)
    kind, hole = (x.reshape(*x.shape[:2], splits, -1).swapaxes(1, 2) for x in (kind, hole))
    at = jnp.argsort(kind, axis=-1, stable=True).astype(jnp.int32)
    hole = jnp.take_along_axis(hole, at, axis=-1)
    start = jnp.arange(splits, dtype=jnp.int32) * kind.shape[-1]
    count = jnp.stack([jnp.sum(kind <= n, axis=-1, dtype=jnp.int32) for n in (0, 1)], axis=-1)
    return 2 * (at + start[:, None, None]) + hole, count
