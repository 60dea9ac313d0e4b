"""Paged attention as a Pallas kernel for TPUs (Mosaic).

The grid is (row of the batch and share of its keys, group of heads, block of rows, tile of keys),
tiles innermost. A tile is several blocks of the pool: the pool is an operand once for each, with an
index map that reads the block table from prefetched scalars, so that all of them are copied while
the tile before is computed. How many tiles there are is data: no step is taken beyond the longest
share.

The pool is read as it lies, heads beside each other in a block: (keys K H) counts as keys K rows of
H, each query row is multiplied with the keys of all heads of the group, and the rule hides those
that are not its own. Loading a key into the matrix unit costs far more than a product with a few
rows, so nothing is lost; the pool is neither turned nor padded.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..attention.flash import FLOOR, Options, fold, merge_splits, unfold
from ..attention.pallas_tpu_tiles import PARAMETERS, dot, scores
from ..dispatch import refuse_platform
from ..pallas_common import pad_axis, round_up
from . import shapes
from .plan import Plan, shares

# Order of the integers of a row: positions that it sees, and its head within the group.
_LO, _HI, _HEAD = range(3)


class _Sizes(NamedTuple):
    """Of a block of rows and of a tile of keys.

    Attributes:
        rows: rows of a block.
        blocks: blocks of the pool in a tile.
        block: keys of a block of the pool.
        heads: key/value heads that lie in a group.
        parts: programs that share the keys of a row.
    """

    rows: int
    blocks: int
    block: int
    heads: int
    parts: int


def supports(q, k_pool, v_pool, plan, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del v_pool
    if (reason := refuse_platform("tpu")) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; the kernel takes bfloat16 or float32"
    block, kv_heads, head_dim = k_pool.shape[1:]
    few = kv_heads in shapes.TPU_FEW_HEADS
    if head_dim % shapes.TPU_LANES or not (few or kv_heads % shapes.TPU_HEADS == 0):
        # XLA lays such a pool out in another way than kernels read.
        return (
            f"a pool with {kv_heads} heads of {head_dim} would be copied whole at each call; "
            f"the kernel takes {' or '.join(map(str, shapes.TPU_FEW_HEADS))} heads or a multiple "
            f"of {shapes.TPU_HEADS}, of a multiple of {shapes.TPU_LANES}"
        )
    size = block * _heads(kv_heads) * head_dim * k_pool.dtype.itemsize
    if size > shapes.TPU_BLOCK_BYTES:
        return (
            f"a block of {block} keys takes {size} bytes; "
            f"the kernel takes at most {shapes.TPU_BLOCK_BYTES}"
        )
    if plan.table.size > shapes.TPU_TABLE_MAX:
        return (
            f"the table has {plan.table.size} entries; "
            f"the kernel takes at most {shapes.TPU_TABLE_MAX}"
        )
    return None


def _heads(kv_heads: int) -> int:
    """How many key/value heads to read together: a register's rows, if they can be told apart."""
    return shapes.TPU_HEADS if kv_heads % shapes.TPU_HEADS == 0 else kv_heads


def run(q, k_pool, v_pool, plan: Plan, *, scale, soft_cap):
    """Runs the kernel. Arguments and results as in `reference`."""
    batch, queries = q.shape[:2]
    block, kv_heads = k_pool.shape[1:3]
    groups, heads = q.shape[2] // kv_heads, _heads(kv_heads)
    columns = block * heads
    table = plan.table.shape[1]
    blocks = max(1, min(table, shapes.TPU_COLUMNS // columns, shapes.TPU_COPIES))
    most = shapes.TPU_SCORES // (columns * blocks) // shapes.TPU_ROW_UNIT * shapes.TPU_ROW_UNIT
    length = round_up(heads * queries * groups, shapes.TPU_ROW_UNIT)
    rows = min(length, max(most, shapes.TPU_ROW_UNIT))
    programs = batch * (kv_heads // heads) * -(-length // rows)
    parts = max(1, min(-(-shapes.TPU_PROGRAMS // programs), -(-table // blocks)))
    options = Options(scale, soft_cap, groups, _Sizes(rows, blocks, block, heads, parts))
    out, log_total = _call(options, fold(q, kv_heads), k_pool, v_pool, plan)
    return unfold(out.astype(q.dtype), log_total, q.shape)


def _by_group(x: Array, heads: int) -> Array:
    """(B R K ...) to (B groups heads*R ...)."""
    batch, rows, kv_heads = x.shape[:3]
    x = x.reshape(batch, rows, kv_heads // heads, heads, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3).reshape(batch, -1, heads * rows, *x.shape[4:])


def _by_head(x: Array, heads: int) -> Array:
    """The way back."""
    batch, groups = x.shape[:2]
    x = x.reshape(batch, groups, heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 3, 1).reshape(batch, x.shape[3], groups * heads, *x.shape[4:])


def _call(options: Options, q, k_pool, v_pool, plan: Plan):
    """The kernel on q (B R K H); returns (B R K H) and (B K R)."""
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    parts, groups = sizes.parts, kv_heads // sizes.heads
    real = sizes.heads * length
    padded = round_up(real, sizes.rows)
    row = jnp.stack(
        (
            *(
                jnp.tile(jnp.repeat(v, options.groups, axis=1), (1, sizes.heads))
                for v in (plan.lo, plan.hi)
            ),
            jnp.broadcast_to(
                jnp.repeat(jnp.arange(sizes.heads, dtype=jnp.int32), length), (batch, real)
            ),
        ),
        axis=2,
    )
    row = pad_axis(row, 1, padded, -1)  # a row of padding sees nothing
    q = pad_axis(_by_group(q, sizes.heads), 2, padded)
    table = pad_axis(plan.table, 1, round_up(plan.table.shape[1], sizes.blocks))
    tiles = table.shape[1] // sizes.blocks
    begin, behind = shares(plan, sizes.blocks * sizes.block, parts)
    steps = jnp.maximum(jnp.max(behind - begin, initial=0), 1)

    def spec(shape, which):
        return pl.BlockSpec(shape, lambda bp, h, i, j, *_: which(bp, h, i))

    def from_pool(n):
        def at(bp, h, i, j, begin, behind, start, stop, table):
            # Beyond its share's last tile a program asks for that again: nothing is copied.
            tile = jnp.maximum(jnp.minimum(begin[bp] + j, behind[bp] - 1), 0)
            entry = (jax.lax.div(bp, parts) * tiles + tile) * sizes.blocks + n
            return table[entry], 0, h, 0

        return pl.BlockSpec((None, sizes.block, sizes.heads, head_dim), at)

    pools = tuple(from_pool(n) for n in range(sizes.blocks))
    by_row = (None, None, sizes.rows)
    out, log_total = pl.pallas_call(
        functools.partial(_kernel, options),
        out_shape=(
            jax.ShapeDtypeStruct((batch * parts, groups, padded, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch * parts, groups, padded, 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch * parts, groups, padded // sizes.rows, steps),
            in_specs=(
                spec((None, sizes.rows, 3), lambda bp, h, i: (jax.lax.div(bp, parts), i, 0)),
                spec((*by_row, head_dim), lambda bp, h, i: (jax.lax.div(bp, parts), h, i, 0)),
                pools,
                pools,
            ),
            out_specs=(
                spec((*by_row, head_dim), lambda bp, h, i: (bp, h, i, 0)),
                spec((*by_row, 1), lambda bp, h, i: (bp, h, i, 0)),
            ),
            scratch_shapes=(
                pltpu.VMEM((sizes.rows, head_dim), jnp.float32),
                pltpu.VMEM((sizes.rows, 1), jnp.float32),
                pltpu.VMEM((sizes.rows, 1), jnp.float32),
            ),
        ),
        compiler_params=PARAMETERS,
        name="paged_attention",
    )(
        *(x.reshape(-1) for x in (begin, behind, plan.start, plan.stop, table)),
        row,
        q,
        (k_pool,) * sizes.blocks,
        (v_pool,) * sizes.blocks,
    )
    out, log_total = out[:, :, :real], log_total[:, :, :real, 0]
    out = _by_head(out, sizes.heads).reshape(batch, parts, length, kv_heads, head_dim)
    log_total = _by_head(log_total, sizes.heads).swapaxes(1, 2)
    return merge_splits(out, log_total.reshape(batch, parts, kv_heads, length))


def _kernel(
    options, begin, behind, start, stop, table, row, q, k, v, out, log_total, total_v, peak, total
):
    del table  # the pools' index maps read it
    sizes: _Sizes = options.sizes
    bp, j = pl.program_id(0), pl.program_id(3)
    b = jax.lax.div(bp, sizes.parts)
    tile = begin[bp] + j

    @pl.when(j == 0)
    def _():
        total_v[...] = jnp.zeros_like(total_v)
        peak[...] = jnp.full_like(peak, FLOOR)
        total[...] = jnp.zeros_like(total)

    def flat(blocks):
        """(keys K H) of every block to (keys*K H) of all."""
        return jnp.concatenate([x[...].reshape(-1, x.shape[2]) for x in blocks], axis=0)

    @pl.when(tile < behind[bp])
    def _():
        keys, values = flat(k), flat(v)
        # Column c of the tile is key `first + c // heads`, head `c % heads`; all comparisons are
        # between multiples of `heads`, which saves the division.
        first = tile * sizes.blocks * sizes.block * sizes.heads
        column = first + jax.lax.broadcasted_iota(jnp.int32, (1, keys.shape[0]), 1)
        line = first + jax.lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0)
        rule = row[...]

        def of(field):
            return rule[:, field : field + 1]

        visible = (of(_LO) * sizes.heads <= column) & (column < (of(_HI) + 1) * sizes.heads)
        visible &= of(_HEAD) == jax.lax.rem(column, sizes.heads)
        # Memory that was never written may hold NaN, and zero times NaN is NaN.
        read = (start[b] * sizes.heads <= line) & (line < stop[b] * sizes.heads)
        values = jnp.where(read, values, jnp.zeros_like(values))
        score = jnp.where(visible, scores(options, q[...], keys), FLOOR)
        before = peak[...]
        now = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
        weight = jnp.where(visible, jnp.exp(score - now), 0.0)
        fade = jnp.exp(before - now)
        total[...] = total[...] * fade + jnp.sum(weight, axis=1, keepdims=True)
        total_v[...] = total_v[...] * fade + dot(weight.astype(values.dtype), values, (1, 0))
        peak[...] = now

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1.0)
        out[...] = total_v[...] / safe
        log_total[...] = jnp.where(some, jnp.log(safe) + peak[...], -jnp.inf)
