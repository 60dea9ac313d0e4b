"""Pieces of which the Mosaic GPU attention kernels are made."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ..compat import load_with_layout
from ..pallas_common import pad_axis, round_up
from . import rows as rules
from .flash import Options
from .rows import Clauses

LOG2_E = math.log2(math.e)
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILE_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA
COLUMN, LINE = WGMMA.reduce(1), WGMMA.reduce(0)
ROW_AT = {name: n for n, name in enumerate(rules.ROW_FIELDS)}
KEY_AT = {name: n for n, name in enumerate(rules.KEY_FIELDS)}


class Sizes(NamedTuple):
    """Rows and keys of a warpgroup's tile, warpgroups that compute, buffers, parts of the keys."""

    rows: int
    keys: int
    backward_keys: int
    warpgroups: int
    stages: int
    head_unit: int
    splits: int


class Arrays(NamedTuple):
    """A call's arrays in whole blocks."""

    q: Array  # B R K H
    k: Array  # B S K H
    v: Array
    rows: Array  # B 4 R
    keys: Array  # B 5 S
    row_bounds: Array
    key_bounds: Array


def arrays(options, row_block, key_block, q, k, v, mask) -> Arrays:
    """Pads q (B R K H), k and v (B S K H) and the rule to whole blocks."""
    length = round_up(q.shape[1], row_block)
    keys = round_up(k.shape[1], key_block)
    rule = rules.mask_rows(mask, options.groups, length, keys)
    q = padded(options, q, length)
    k, v = padded(options, k, keys), padded(options, v, keys)
    return Arrays(
        q,
        k,
        v,
        jnp.swapaxes(rule.rows, 1, 2),
        rule.keys,
        rules.row_bounds(rule.rows, row_block),
        rules.key_bounds(rule.keys, key_block),
    )


def padded(options, x, length):
    """Appends zeros to (B R K H) up to `length` rows and whole units of H."""
    width = round_up(x.shape[3], options.sizes.head_unit)
    return pad_axis(pad_axis(x, 3, width), 1, length)


def kernel(body, name, warpgroups, grid, names, outs, scratch):
    """A kernel of warpgroups that compute, and a last one that copies."""
    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=scratch,
        grid=grid,
        grid_names=names,
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )


def share_registers(warpgroups: int, *, computes: bool) -> None:
    """Gives registers of the warpgroup that copies to those that compute, if those are two.

    One of each has all it can address anyway.
    """
    if warpgroups == 2:
        plgpu.set_max_registers(
            232 if computes else 40, action="increase" if computes else "decrease"
        )


def full(shape, value, layout=WGMMA) -> Array:
    """A constant, laid out as wgmma's results are."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_row(vector, shape) -> Array:
    """A vector over rows, repeated along columns."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def by_column(vector, shape) -> Array:
    """A vector over columns, repeated along rows."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def product(a, b, shape) -> Array:
    """Returns a @ b in float32; a lies in registers or shared memory, b in shared memory."""

    def multiply(total):
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_product(total, a, b) -> Array:
    """Returns total + a @ b."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(total))


def release(used) -> None:
    """Tells the warpgroup that copies that registers were loaded from a place in the ring.

    Such loads are ordered before the copies that come next by a fence; what only wgmma read needs
    none.
    """
    plgpu.commit_smem()
    plgpu.barrier_arrive(used)


def scores(options: Options, product) -> Array:
    """The scores, by the product of queries and keys."""
    if options.soft_cap is None:
        return product * options.scale
    return options.soft_cap * jnp.tanh(product * (options.scale / options.soft_cap))


def visible(clauses: Clauses, row, key) -> Array:
    """The rule for a tile; `row` and `key` map a field to its values, as wide as the tile."""
    return rules.visible(clauses, lambda n: row(ROW_AT[n]), lambda n: key(KEY_AT[n]))


def clean(tile, written) -> None:
    """Zeroes the rows of a tile in shared memory whose key was never written (64 keys)."""
    values = load_with_layout(tile, WGMMA)
    keep = by_row(written != 0, tile.shape)
    tile[...] = jnp.where(keep, values, jnp.zeros_like(values))


def clean_shared(warpgroups, tiles, key_tile, slot, me, keys, cleaned) -> None:
    """Cleans a block that all warpgroups read: each its share of 64 keys; waits for the others.

    Args:
        warpgroups: how many compute.
        tiles: rings of tiles (stages keys H), all to be cleaned.
        key_tile: the ring of `KEY_FIELDS`, (stages 5 keys).
        slot: the place in the rings.
        me: this warpgroup.
        keys: keys of a block, a multiple of 64.
        cleaned: a barrier at which every warpgroup arrives.
    """
    shares = [(tile, start) for tile in tiles for start in range(0, keys, 64)]

    def do(tile, start):
        mine = pl.ds(start, 64)
        written = load_with_layout(key_tile.at[slot, KEY_AT["written"], mine], COLUMN)
        clean(tile.at[slot, mine], written)

    for n, share in enumerate(shares):
        pl.when(me == n % warpgroups)(functools.partial(do, *share))
    plgpu.commit_smem()
    plgpu.barrier_arrive(cleaned)
    plgpu.barrier_wait(cleaned)
