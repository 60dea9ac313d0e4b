"""Flash attention as Mosaic GPU kernels for Hopper, forward and backward.

A program has up to two warpgroups that compute, 64 rows each, and one that copies: it walks the
list of blocks of keys that the program's rows may see (`rows.block_lists`: first those without a
mask, then those with) and fills a ring of buffers by TMA, which the others read by wgmma. The
backward pass has two kernels, one along the keys for dq, one along the rows for dk and dv, where
the scores are made on their side so that no tile is turned.

Heads stay where the projections wrote them, (B R K H). Memory of keys that were never written may
hold NaN; a block with such keys is cleaned in shared memory before it is multiplied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import load_with_layout
from ..dispatch import refuse_platform
from . import mosaic_gpu_tiles as tiles
from . import rows as rules
from . import shapes
from .flash import FLOOR, Kernels, Options, flash_attention, merge_splits, split_count
from .mask import AttentionMask
from .pallas_mosaic_gpu_backward import backward


def supports(q, k, v, mask, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del v
    if (reason := refuse_platform("gpu", 9.0)) is not None:
        return reason
    if q.dtype != jnp.bfloat16 or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; the kernel takes bfloat16"
    if q.shape[3] > shapes.GPU_HEAD_MAX:
        return f"H is {q.shape[3]}; the kernel takes at most {shapes.GPU_HEAD_MAX}"
    if mask.tree is not None:
        return "the mask has a tree; the kernel takes none"
    if 0 in (*q.shape, *k.shape):
        return f"q {q.shape} and k {k.shape} hold nothing"
    return None


def run(q, k, v, mask, *, scale, soft_cap):
    """Runs the kernels. Arguments and results as in `reference`."""
    groups = q.shape[2] // k.shape[2]
    length = q.shape[1] * groups
    splits = 1
    if length <= shapes.GPU_ROWS:
        blocks = -(-k.shape[1] // shapes.GPU_KEYS)
        splits = split_count(q.shape[0] * k.shape[2], shapes.GPU_PROGRAMS, blocks)
    sizes = tiles.Sizes(
        rows=shapes.GPU_ROWS,
        keys=shapes.GPU_KEYS,
        backward_keys=shapes.GPU_BACKWARD_KEYS,
        warpgroups=1 if length <= shapes.GPU_ROWS else shapes.GPU_WARPGROUPS,
        stages=shapes.GPU_STAGES,
        head_unit=shapes.GPU_HEAD_UNIT,
        splits=splits,
    )
    options = Options(float(scale), soft_cap, groups, sizes)
    return flash_attention(KERNELS, options, q, k, v, mask)


def _forward(options: Options, q, k, v, mask: AttentionMask):
    sizes: tiles.Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    tile = sizes.rows * sizes.warpgroups
    arrays = tiles.arrays(options, tile, sizes.keys, q, k, v, mask)
    padded, width = arrays.q.shape[1], arrays.q.shape[3]
    parts = sizes.splits
    blocks, counts = rules.block_lists(
        arrays.row_bounds, arrays.key_bounds, tree=False, splits=parts
    )
    out_type = q.dtype if parts == 1 else jnp.float32
    body = functools.partial(_forward_kernel, options, rules.clauses_of(mask))
    rows = (sizes.warpgroups, sizes.rows)
    ring = (sizes.stages, sizes.keys)
    scratch = dict(
        q_tile=plgpu.SMEM((*rows, width), q.dtype, transforms=tiles.TILE),
        out_tile=None
        if parts == 1
        else plgpu.SMEM((*rows, width), jnp.float32, transforms=tiles.TILE_32),
        total_tile=plgpu.SMEM(rows, jnp.float32),
        row_tile=plgpu.SMEM((sizes.warpgroups, len(tiles.ROW_AT), sizes.rows), jnp.int32),
        k_tile=plgpu.SMEM((*ring, width), k.dtype, transforms=tiles.TILE),
        v_tile=plgpu.SMEM((*ring, width), v.dtype, transforms=tiles.TILE),
        key_tile=plgpu.SMEM((sizes.stages, len(tiles.KEY_AT), sizes.keys), jnp.int32),
        q_here=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.warpgroups),
        k_here=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
        v_here=plgpu.Barrier(num_barriers=sizes.stages),
        k_used=plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.stages),
        v_used=plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.stages),
        cleaned=plgpu.Barrier(num_arrivals=sizes.warpgroups),
    )
    out, log_total = tiles.kernel(
        body,
        "attention_forward",
        sizes.warpgroups,
        (kv_heads, padded // tile, batch * parts),
        ("head", "tile", "part"),
        (
            jax.ShapeDtypeStruct((batch * parts, padded, kv_heads, width), out_type),
            jax.ShapeDtypeStruct((batch * parts, kv_heads, padded), jnp.float32),
        ),
        scratch,
    )(
        arrays.q,
        arrays.k,
        arrays.v,
        arrays.rows,
        arrays.keys,
        blocks.reshape(-1, *blocks.shape[2:]),
        counts.reshape(-1, *counts.shape[2:]),
    )
    out, log_total = out[:, :length, :, :head_dim], log_total[:, :, :length]
    if parts == 1:
        return out, log_total
    out, log_total = merge_splits(
        out.reshape(batch, parts, *out.shape[1:]),
        log_total.reshape(batch, parts, *log_total.shape[1:]),
    )
    return out.astype(q.dtype), log_total


def _forward_kernel(
    options, clauses, q, k, v, rows, keys, blocks, counts, out, log_total,
    *, q_tile, out_tile, total_tile, row_tile, k_tile, v_tile, key_tile,
    q_here, k_here, v_here, k_used, v_used, cleaned,
):  # fmt: skip
    sizes: tiles.Sizes = options.sizes
    head, tile = lax.axis_index("head"), lax.axis_index("tile")
    part, me = lax.axis_index("part"), lax.axis_index("warpgroup")
    b = lax.div(part, jnp.int32(sizes.splits))
    unmasked, seen = counts[part, tile, 0], counts[part, tile, 1]
    shape = (sizes.rows, sizes.keys)
    width = q.shape[3]

    @pl.when(me < sizes.warpgroups)
    def _():
        tiles.share_registers(sizes.warpgroups, computes=True)
        mine = pl.ds((tile * sizes.warpgroups + me) * sizes.rows, sizes.rows)
        plgpu.copy_gmem_to_smem(q.at[b, mine, head], q_tile.at[me], q_here.at[me])
        plgpu.copy_gmem_to_smem(rows.at[b, :, mine], row_tile.at[me], q_here.at[me])
        plgpu.barrier_wait(q_here.at[me])

        def step(n, carry, masked):
            total_v, peak, total = carry
            slot = lax.rem(n, jnp.int32(sizes.stages))
            plgpu.barrier_wait(k_here.at[slot])
            scores = tiles.scores(
                options, tiles.product(q_tile.at[me], k_tile.at[slot].transpose((1, 0)), shape)
            )
            if masked:
                visible = tiles.visible(
                    clauses,
                    lambda f: tiles.by_row(
                        load_with_layout(row_tile.at[me, f], tiles.COLUMN), shape
                    ),
                    lambda f: tiles.by_column(
                        load_with_layout(key_tile.at[slot, f], tiles.LINE), shape
                    ),
                )
                scores = jnp.where(visible, scores, FLOOR)
            else:
                plgpu.barrier_arrive(k_used.at[slot])
            # Powers of two: one multiplication and addition less per score.
            scores = scores * tiles.LOG2_E
            now = jnp.maximum(peak, jnp.max(scores, axis=1))
            weight = jnp.exp2(scores - tiles.by_row(now, shape))
            if masked:
                weight = jnp.where(visible, weight, 0.0)
            fade = jnp.exp2(peak - now)
            total = total * fade + jnp.sum(weight, axis=1)
            total_v = total_v * tiles.by_row(fade, total_v.shape)
            plgpu.barrier_wait(v_here.at[slot])
            if masked:
                hole = lax.rem(blocks[part, tile, n], jnp.int32(2))

                @pl.when(hole != 0)
                def _():
                    tiles.clean_shared(
                        sizes.warpgroups, (v_tile,), key_tile, slot, me, sizes.keys, cleaned
                    )

                tiles.release(k_used.at[slot])
            total_v = tiles.add_product(total_v, weight.astype(v.dtype), v_tile.at[slot])
            plgpu.barrier_arrive(v_used.at[slot])
            return total_v, now, total

        carry = (
            tiles.full((sizes.rows, width), 0.0),
            tiles.full((sizes.rows,), FLOOR, tiles.COLUMN),
            tiles.full((sizes.rows,), 0.0, tiles.COLUMN),
        )
        carry = lax.fori_loop(0, unmasked, functools.partial(step, masked=False), carry)
        carry = lax.fori_loop(unmasked, seen, functools.partial(step, masked=True), carry)
        total_v, peak, total = carry
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        result = q_tile if out_tile is None else out_tile
        value = total_v / tiles.by_row(safe, total_v.shape)
        result[me] = value.astype(result.dtype)
        total_tile[me] = jnp.where(some, jnp.log(safe) + peak * (1 / tiles.LOG2_E), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result.at[me], out.at[part, mine, head])
        plgpu.copy_smem_to_gmem(total_tile.at[me], log_total.at[part, head, mine])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == sizes.warpgroups)
    def _():
        tiles.share_registers(sizes.warpgroups, computes=False)

        @pl.loop(0, seen)
        def _(n):
            slot = lax.rem(n, jnp.int32(sizes.stages))
            at = pl.ds(lax.div(blocks[part, tile, n], jnp.int32(2)) * sizes.keys, sizes.keys)
            again = n >= sizes.stages
            pl.when(again)(lambda: plgpu.barrier_wait(k_used.at[slot]))
            plgpu.copy_gmem_to_smem(k.at[b, at, head], k_tile.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(keys.at[b, :, at], key_tile.at[slot], k_here.at[slot])
            pl.when(again)(lambda: plgpu.barrier_wait(v_used.at[slot]))
            plgpu.copy_gmem_to_smem(v.at[b, at, head], v_tile.at[slot], v_here.at[slot])


KERNELS = Kernels(_forward, backward)
