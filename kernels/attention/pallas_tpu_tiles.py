"""Pieces of which the TPU attention kernels are made."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..pallas_common import pad_axis, round_up
from . import rows as rules
from .flash import Options
from .rows import BOUNDS, Clauses

PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
)


class Sizes(NamedTuple):
    """Rows and keys of a block, rows of one in the backward pass, lanes, parts of the keys."""

    rows: int
    backward_rows: int
    keys: int
    lanes: int
    splits: int


class Block(NamedTuple):
    """What a kernel reads of a block of rows and a block of keys."""

    q: Any  # rows H
    k: Any  # keys H
    v: Any  # keys H
    row: Any  # rows 4
    key: Any  # 5 keys
    written: Any  # keys 1
    tree: Any  # rows keys, or None
    d_out: Any = None  # rows H
    stats: Any = None  # rows 2: log_total, delta


class Arrays(NamedTuple):
    """A call's arrays in whole blocks, and the scalars that kernels are steered by."""

    block: Block
    q_bounds: Array  # B q 8
    k_bounds: Array  # B k 8


def arrays(options, rows, q, k, v, mask, d_out=None, stats=None) -> Arrays:
    """Pads everything to whole blocks of `rows` rows and lays heads side by side."""
    sizes = options.sizes
    length = round_up(q.shape[1], rows)
    keys = round_up(k.shape[1], sizes.keys)

    def heads(x, size):
        if x is None:
            return None
        x = pad_axis(pad_axis(x, 3, round_up(x.shape[3], sizes.lanes)), 1, size)
        return x.reshape(*x.shape[:2], -1)

    rule = rules.mask_rows(mask, options.groups, length, keys)
    block = Block(
        heads(q, length),
        heads(k, keys),
        heads(v, keys),
        rule.rows,
        rule.keys,
        rule.keys[:, rules.KEY_FIELDS.index("written"), :, None],
        rule.tree,
        heads(d_out, length),
        None if stats is None else pad_axis(stats, 2, length),
    )
    return Arrays(block, rules.row_bounds(rule.rows, rows), rules.key_bounds(rule.keys, sizes.keys))


def specs(block: Block, sizes: Sizes, rows: int, width: int, at) -> Block:
    """Block specs; `at` maps a grid index to (b, head, block of rows, block of keys)."""

    def spec(shape, which):
        return pl.BlockSpec(shape, lambda *index: which(*at(*index)))

    by_row = spec((None, rows, width), lambda b, h, i, j: (b, i, h))
    by_key = spec((None, sizes.keys, width), lambda b, h, i, j: (b, j, h))
    specs = Block(
        q=by_row,
        k=by_key,
        v=by_key,
        row=spec((None, rows, len(rules.ROW_FIELDS)), lambda b, h, i, j: (b, i, 0)),
        key=spec((None, len(rules.KEY_FIELDS), sizes.keys), lambda b, h, i, j: (b, 0, j)),
        written=spec((None, sizes.keys, 1), lambda b, h, i, j: (b, j, 0)),
        tree=spec((None, rows, sizes.keys), lambda b, h, i, j: (b, i, j)),
        d_out=by_row,
        stats=spec((None, None, rows, 2), lambda b, h, i, j: (b, h, i, 0)),
    )
    return Block(*(None if v is None else s for v, s in zip(block, specs, strict=True)))


def within(index, first, last):
    """The index, or the nearest inside the span: a block that is not needed is not copied."""
    return jnp.maximum(jnp.minimum(jnp.maximum(index, first), last), 0)


def bounds(ref, at):
    """Returns the bounds of a block, from prefetched scalars."""
    return [ref[at * BOUNDS + n] for n in range(BOUNDS)]


def when_seen(q_bounds, k_bounds, clauses: Clauses, step) -> None:
    """Calls `step(masked)` if somebody may see something; masked is False if all see all."""
    some = rules.may_see(q_bounds, k_bounds)
    if clauses.tree:
        pl.when(some)(functools.partial(step, True))
        return
    every = rules.sees_all(q_bounds, k_bounds)
    pl.when(some & every)(functools.partial(step, False))
    pl.when(some & ~every)(functools.partial(step, True))


def dot(a, b, contract) -> Array:
    """A product summed in float32; float32 factors are not rounded to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def load(block: Block, masked: bool):
    """Keys and values; zeros where nothing was written, for that memory may hold NaN."""
    k, v = block.k[...], block.v[...]
    if masked:
        written = block.written[...] != 0
        k, v = jnp.where(written, k, jnp.zeros_like(k)), jnp.where(written, v, jnp.zeros_like(v))
    return k, v


def scores(options: Options, q, k) -> Array:
    """The scores of rows (rows H) and keys (keys H)."""
    product = dot(q, k, (1, 1)) * options.scale
    if options.soft_cap is None:
        return product
    return options.soft_cap * jnp.tanh(product / options.soft_cap)


def visible(block: Block, clauses: Clauses) -> Array:
    """The rule, (rows keys)."""
    row, key = block.row[...], block.key[...]

    def column(name):
        at = rules.ROW_FIELDS.index(name)
        return row[:, at : at + 1]

    def line(name):
        at = rules.KEY_FIELDS.index(name)
        return key[at : at + 1, :]

    return rules.visible(clauses, column, line, block.tree[...] if clauses.tree else None)
