"""Paged attention as a Mosaic GPU kernel for Hopper.

A program has a warpgroup that computes, for 64 rows of one key/value head, and one that copies: it
walks the program's share of the row's tiles of keys, reads the block table, and fills a ring of
buffers by TMA, one copy for each block of the pool in a tile (or one for a part of a block, where a
block is larger). What lies in a tile without being needed may be NaN: it is hidden among the keys
and zeroed among the values before they are multiplied.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention import mosaic_gpu_tiles as tiles
from ..attention.flash import FLOOR, Options, fold, merge_splits, unfold
from ..compat import load_with_layout
from ..dispatch import refuse_platform
from ..pallas_common import pad_axis, round_up
from . import shapes
from .plan import Plan, shares


class _Sizes(NamedTuple):
    """Rows and keys of a tile, buffers, and programs that share the keys of a row."""

    rows: int
    keys: int
    stages: int
    parts: int


def supports(q, k_pool, v_pool, plan, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del v_pool, plan
    if (reason := refuse_platform("gpu", 9.0)) is not None:
        return reason
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}; the kernel takes bfloat16"
    unit, widest = shapes.GPU_HEAD_UNIT, shapes.GPU_HEAD_MAX
    if q.shape[3] % unit or q.shape[3] > widest:
        # A narrower head could be padded, but then the whole pool would be, at each call.
        return f"H is {q.shape[3]}; the kernel takes multiples of {unit} up to {widest}"
    block, keys = k_pool.shape[1], shapes.GPU_KEYS
    if block % shapes.GPU_BLOCK_UNIT or (keys % block and block % keys):
        return (
            f"a block has {block} keys; the kernel takes a multiple of {shapes.GPU_BLOCK_UNIT} "
            f"that divides {keys}, or a multiple of {keys}"
        )
    return None


def run(q, k_pool, v_pool, plan: Plan, *, scale, soft_cap):
    """Runs the kernel. Arguments and results as in `reference`."""
    batch, queries, heads, _ = q.shape
    block, kv_heads = k_pool.shape[1:3]
    groups = heads // kv_heads
    rows, keys = shapes.GPU_ROWS, shapes.GPU_KEYS
    programs = batch * kv_heads * -(-queries * groups // rows)
    most = -(-plan.table.shape[1] * block // keys)
    parts = max(1, min(-(-shapes.GPU_PROGRAMS // programs), most))
    options = Options(scale, soft_cap, groups, _Sizes(rows, keys, shapes.GPU_STAGES, parts))
    out, log_total = _call(options, fold(q, kv_heads), k_pool, v_pool, plan)
    return unfold(out.astype(q.dtype), log_total, q.shape)


def _call(options: Options, q, k_pool, v_pool, plan: Plan):
    """The kernel on q (B R K H); returns (B R K H) and (B K R)."""
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, width = q.shape
    parts, padded = sizes.parts, round_up(length, sizes.rows)
    # Of a lone tile only the rows that hold something are written, in whole swizzles.
    kept = padded if padded > sizes.rows else round_up(length, shapes.GPU_BLOCK_UNIT)
    copies = max(1, sizes.keys // k_pool.shape[1])
    q = pad_axis(q, 1, padded)
    row = jnp.stack([jnp.repeat(v, options.groups, axis=1) for v in (plan.lo, plan.hi)], axis=1)
    row = pad_axis(row, 2, padded, -1)  # a row of padding sees nothing
    span = jnp.stack(shares(plan, sizes.keys, parts), axis=2).reshape(-1, 2)
    # A tile is copied whole.
    table = pad_axis(plan.table, 1, round_up(plan.table.shape[1], copies))
    ring = (sizes.stages, sizes.keys, width)
    out, log_total = tiles.kernel(
        functools.partial(_kernel, options),
        "paged_attention",
        1,
        (kv_heads, padded // sizes.rows, batch * parts),
        ("head", "tile", "part"),
        (
            jax.ShapeDtypeStruct((batch * parts, kept, kv_heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch * parts, kv_heads, kept), jnp.float32),
        ),
        dict(
            q_tile=plgpu.SMEM((sizes.rows, width), q.dtype, transforms=tiles.TILE),
            out_tile=plgpu.SMEM((sizes.rows, width), jnp.float32, transforms=tiles.TILE_32),
            total_tile=plgpu.SMEM((sizes.rows,), jnp.float32),
            row_tile=plgpu.SMEM((2, sizes.rows), jnp.int32),
            k_tile=plgpu.SMEM(ring, k_pool.dtype, transforms=tiles.TILE),
            v_tile=plgpu.SMEM(ring, v_pool.dtype, transforms=tiles.TILE),
            q_here=plgpu.Barrier(num_arrivals=2),
            k_here=plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
            v_here=plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
            k_used=plgpu.Barrier(num_barriers=sizes.stages),
            v_used=plgpu.Barrier(num_barriers=sizes.stages),
        ),
    )(q, k_pool, v_pool, table, row, span, jnp.stack((plan.start, plan.stop), axis=1))
    out, log_total = out[:, :length], log_total[:, :, :length]
    return merge_splits(
        out.reshape(batch, parts, *out.shape[1:]),
        log_total.reshape(batch, parts, *log_total.shape[1:]),
    )


def _copy(pool, table, b, head, n, tile, here) -> None:
    """Starts to copy the n-th tile of a row's keys, or values, to shared memory (keys H)."""
    keys, block = tile.shape[0], pool.shape[1]
    if block > keys:
        per_block = jnp.int32(block // keys)
        page, at = table[b, lax.div(n, per_block)], lax.rem(n, per_block) * keys
        plgpu.copy_gmem_to_smem(pool.at[page, pl.ds(at, keys), head], tile, here)
        return
    for part in range(keys // block):
        page = table[b, n * (keys // block) + part]
        plgpu.copy_gmem_to_smem(pool.at[page, :, head], tile.at[pl.ds(part * block, block)], here)


def _clean(values, first, start, stop) -> None:
    """Zeroes the values (keys H) of keys outside of start and stop, counted from the row's."""
    for at in range(0, values.shape[0], 64):
        some = values.at[pl.ds(at, 64)]
        held = load_with_layout(some, tiles.WGMMA)
        position = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=tiles.WGMMA)
        position = position + (first + at)
        keep = (start <= position) & (position < stop)
        some[...] = jnp.where(keep, held, jnp.zeros_like(held))
    plgpu.commit_smem()


def _kernel(
    options, q, k_pool, v_pool, table, row, span, seen, out, log_total,
    *, q_tile, out_tile, total_tile, row_tile, k_tile, v_tile,
    q_here, k_here, v_here, k_used, v_used,
):  # fmt: skip
    sizes: _Sizes = options.sizes
    head, tile = lax.axis_index("head"), lax.axis_index("tile")
    part, me = lax.axis_index("part"), lax.axis_index("warpgroup")
    b = lax.div(part, jnp.int32(sizes.parts))
    begin, behind = span[part, 0], span[part, 1]
    start, stop = seen[b, 0], seen[b, 1]
    shape, width = (sizes.rows, sizes.keys), q.shape[3]

    @pl.when(me == 0)
    def _():
        mine = pl.ds(tile * sizes.rows, sizes.rows)
        plgpu.copy_gmem_to_smem(q.at[b, mine, head], q_tile, q_here)
        plgpu.copy_gmem_to_smem(row.at[b, :, mine], row_tile, q_here)
        plgpu.barrier_wait(q_here)

        def step(n, carry):
            total_v, peak, total = carry
            slot = lax.rem(n - begin, jnp.int32(sizes.stages))
            first = n * sizes.keys
            plgpu.barrier_wait(k_here.at[slot])
            product = tiles.product(q_tile, k_tile.at[slot].transpose((1, 0)), shape)
            plgpu.barrier_arrive(k_used.at[slot])
            position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tiles.WGMMA) + first
            lo, hi = (
                tiles.by_row(load_with_layout(row_tile.at[f], tiles.COLUMN), shape) for f in (0, 1)
            )
            visible = (lo <= position) & (position <= hi)
            # Powers of two: one multiplication and addition less per score.
            scores = jnp.where(visible, tiles.scores(options, product), FLOOR) * tiles.LOG2_E
            now = jnp.maximum(peak, jnp.max(scores, axis=1))
            weight = jnp.where(visible, jnp.exp2(scores - tiles.by_row(now, shape)), 0.0)
            fade = jnp.exp2(peak - now)
            total = total * fade + jnp.sum(weight, axis=1)
            total_v = total_v * tiles.by_row(fade, total_v.shape)
            plgpu.barrier_wait(v_here.at[slot])

            @pl.when((first < start) | (first + sizes.keys > stop))
            def _():
                _clean(v_tile.at[slot], first, start, stop)

            total_v = tiles.add_product(total_v, weight.astype(v_tile.dtype), v_tile.at[slot])
            plgpu.barrier_arrive(v_used.at[slot])
            return total_v, now, total

        carry = (
            tiles.full((sizes.rows, width), 0.0),
            tiles.full((sizes.rows,), FLOOR, tiles.COLUMN),
            tiles.full((sizes.rows,), 0.0, tiles.COLUMN),
        )
        total_v, peak, total = lax.fori_loop(begin, behind, step, carry)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        out_tile[...] = total_v / tiles.by_row(safe, total_v.shape)
        total_tile[...] = jnp.where(some, jnp.log(safe) + peak * (1 / tiles.LOG2_E), -jnp.inf)
        plgpu.commit_smem()
        kept = min(sizes.rows, out.shape[1])
        to, held = pl.ds(tile * sizes.rows, kept), pl.ds(0, kept)
        plgpu.copy_smem_to_gmem(out_tile.at[held], out.at[part, to, head])
        plgpu.copy_smem_to_gmem(total_tile.at[held], log_total.at[part, head, to])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == 1)
    def _():
        @pl.loop(begin, behind)
        def _(n):
            slot = lax.rem(n - begin, jnp.int32(sizes.stages))
            again = n - begin >= sizes.stages
            pl.when(again)(lambda: plgpu.barrier_wait(k_used.at[slot]))
            _copy(k_pool, table, b, head, n, k_tile.at[slot], k_here.at[slot])
            pl.when(again)(lambda: plgpu.barrier_wait(v_used.at[slot]))
            _copy(v_pool, table, b, head, n, v_tile.at[slot], v_here.at[slot])
