"""The backward kernels of `pallas_mosaic_gpu`: one for dq, one for dk and dv.

Both compute the probabilities again, as powers of two. The kernel for dk and dv works on scores
lying on their side, (keys, rows): so its products take their left factors from registers as they
are.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import load_with_layout
from ..pallas_common import pad_axis
from . import mosaic_gpu_tiles as tiles
from . import rows as rules
from .flash import Options
from .mask import AttentionMask

_LOG_TOTAL, _DELTA = 0, 1


def backward(options: Options, q, k, v, mask: AttentionMask, d_out, log_total, delta):
    """Returns dq, dk and dv; see `flash.Kernels`."""
    sizes: tiles.Sizes = options.sizes
    length, keys, width = q.shape[1], k.shape[1], q.shape[3]
    clauses = rules.clauses_of(mask)
    # Rows and keys change roles between the kernels; the larger tile is the one that stays.
    along_keys = sizes.rows * sizes.warpgroups, sizes.backward_keys
    key_warpgroups = 1 if keys <= sizes.rows else sizes.warpgroups
    along_rows = sizes.rows, sizes.rows * key_warpgroups

    def prepare(row_block, key_block):
        arrays = tiles.arrays(options, row_block, key_block, q, k, v, mask)
        stats = jnp.stack((log_total * tiles.LOG2_E, delta), axis=2)
        size = arrays.q.shape[1]
        return arrays, tiles.padded(options, d_out, size), pad_axis(stats, 3, size)

    (dq,) = _query_gradient(options, clauses, sizes.warpgroups, *prepare(*along_keys))
    dk, dv = _key_gradients(options, clauses, key_warpgroups, *prepare(*along_rows))
    return dq[:, :length, :, :width], dk[:, :keys, :, :width], dv[:, :keys, :, :width]


def _slope(options: Options, chance, d_chance, scores, delta):
    """The gradient of the scores, but for the factor `scale`."""
    slope = chance * (d_chance - delta)
    if options.soft_cap is None:
        return slope
    capped = scores * (1.0 / options.soft_cap)
    return slope * (1.0 - capped * capped)


def _query_gradient(options, clauses, warpgroups, arrays: tiles.Arrays, d_out, stats):
    sizes: tiles.Sizes = options.sizes
    batch, length, kv_heads, width = arrays.q.shape
    dtype = arrays.q.dtype
    blocks, counts = rules.block_lists(arrays.row_bounds, arrays.key_bounds, tree=False)
    rows, ring = (warpgroups, sizes.rows), (sizes.stages, sizes.backward_keys)
    scratch = dict(
        q_tile=plgpu.SMEM((*rows, width), dtype, transforms=tiles.TILE),
        d_out_tile=plgpu.SMEM((*rows, width), dtype, transforms=tiles.TILE),
        row_tile=plgpu.SMEM((warpgroups, len(tiles.ROW_AT), sizes.rows), jnp.int32),
        stats_tile=plgpu.SMEM((warpgroups, 2, sizes.rows), jnp.float32),
        k_tile=plgpu.SMEM((*ring, width), dtype, transforms=tiles.TILE),
        v_tile=plgpu.SMEM((*ring, width), dtype, transforms=tiles.TILE),
        key_tile=plgpu.SMEM((sizes.stages, len(tiles.KEY_AT), ring[1]), jnp.int32),
        rows_here=plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups),
        keys_here=plgpu.Barrier(num_arrivals=3, num_barriers=sizes.stages),
        keys_used=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=sizes.stages),
        cleaned=plgpu.Barrier(num_arrivals=warpgroups),
    )
    return tiles.kernel(
        functools.partial(_query_kernel, options, clauses, warpgroups),
        "attention_backward_queries",
        warpgroups,
        (kv_heads, length // (sizes.rows * warpgroups), batch),
        ("head", "tile", "b"),
        (jax.ShapeDtypeStruct(arrays.q.shape, dtype),),
        scratch,
    )(
        arrays.q, arrays.k, arrays.v, d_out, stats, arrays.rows, arrays.keys,
        blocks[:, 0], counts[:, 0],
    )  # fmt: skip


def _query_kernel(
    options, clauses, warpgroups, q, k, v, d_out, stats, rows, keys, blocks, counts, dq,
    *, q_tile, d_out_tile, row_tile, stats_tile, k_tile, v_tile, key_tile,
    rows_here, keys_here, keys_used, cleaned,
):  # fmt: skip
    sizes: tiles.Sizes = options.sizes
    head, tile = lax.axis_index("head"), lax.axis_index("tile")
    b, me = lax.axis_index("b"), lax.axis_index("warpgroup")
    unmasked, seen = counts[b, tile, 0], counts[b, tile, 1]
    block = sizes.backward_keys
    shape = (sizes.rows, block)

    @pl.when(me < warpgroups)
    def _():
        tiles.share_registers(warpgroups, computes=True)
        mine = pl.ds((tile * warpgroups + me) * sizes.rows, sizes.rows)
        plgpu.copy_gmem_to_smem(q.at[b, mine, head], q_tile.at[me], rows_here.at[me])
        plgpu.copy_gmem_to_smem(d_out.at[b, mine, head], d_out_tile.at[me], rows_here.at[me])
        plgpu.copy_gmem_to_smem(rows.at[b, :, mine], row_tile.at[me], rows_here.at[me])
        plgpu.copy_gmem_to_smem(stats.at[b, head, :, mine], stats_tile.at[me], rows_here.at[me])
        plgpu.barrier_wait(rows_here.at[me])

        def stat(n):
            return tiles.by_row(load_with_layout(stats_tile.at[me, n], tiles.COLUMN), shape)

        def step(n, sum_q, masked):
            slot = lax.rem(n, jnp.int32(sizes.stages))
            plgpu.barrier_wait(keys_here.at[slot])
            if masked:
                hole = lax.rem(blocks[b, tile, n], jnp.int32(2))

                @pl.when(hole != 0)
                def _():
                    both = (k_tile, v_tile)
                    tiles.clean_shared(warpgroups, both, key_tile, slot, me, block, cleaned)

            scores = tiles.product(q_tile.at[me], k_tile.at[slot].transpose((1, 0)), shape)
            scores = tiles.scores(options, scores)
            chance = jnp.exp2(scores * tiles.LOG2_E - stat(_LOG_TOTAL))
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
                chance = jnp.where(visible, chance, 0.0)
            d_chance = tiles.product(d_out_tile.at[me], v_tile.at[slot].transpose((1, 0)), shape)
            slope = _slope(options, chance, d_chance, scores, stat(_DELTA))
            sum_q = tiles.add_product(sum_q, slope.astype(k.dtype), k_tile.at[slot])
            if masked:
                tiles.release(keys_used.at[slot])
            else:
                plgpu.barrier_arrive(keys_used.at[slot])
            return sum_q

        sum_q = tiles.full((sizes.rows, q.shape[3]), 0.0)
        sum_q = lax.fori_loop(0, unmasked, functools.partial(step, masked=False), sum_q)
        sum_q = lax.fori_loop(unmasked, seen, functools.partial(step, masked=True), sum_q)
        q_tile[me] = (sum_q * options.scale).astype(dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile.at[me], dq.at[b, mine, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == warpgroups)
    def _():
        tiles.share_registers(warpgroups, computes=False)

        @pl.loop(0, seen)
        def _(n):
            slot = lax.rem(n, jnp.int32(sizes.stages))
            at = pl.ds(lax.div(blocks[b, tile, n], jnp.int32(2)) * block, block)
            pl.when(n >= sizes.stages)(lambda: plgpu.barrier_wait(keys_used.at[slot]))
            here = keys_here.at[slot]
            plgpu.copy_gmem_to_smem(k.at[b, at, head], k_tile.at[slot], here)
            plgpu.copy_gmem_to_smem(v.at[b, at, head], v_tile.at[slot], here)
            plgpu.copy_gmem_to_smem(keys.at[b, :, at], key_tile.at[slot], here)


def _key_gradients(options, clauses, warpgroups, arrays: tiles.Arrays, d_out, stats):
    sizes: tiles.Sizes = options.sizes
    batch, length, kv_heads, width = arrays.k.shape
    dtype = arrays.k.dtype
    blocks, counts = rules.block_lists(
        arrays.row_bounds, arrays.key_bounds, tree=False, by_key=True
    )
    keys, ring = (warpgroups, sizes.rows), (sizes.stages, sizes.rows)
    scratch = dict(
        k_tile=plgpu.SMEM((*keys, width), dtype, transforms=tiles.TILE),
        v_tile=plgpu.SMEM((*keys, width), dtype, transforms=tiles.TILE),
        key_tile=plgpu.SMEM((warpgroups, len(tiles.KEY_AT), sizes.rows), jnp.int32),
        q_tile=plgpu.SMEM((*ring, width), dtype, transforms=tiles.TILE),
        d_out_tile=plgpu.SMEM((*ring, width), dtype, transforms=tiles.TILE),
        row_tile=plgpu.SMEM((sizes.stages, len(tiles.ROW_AT), sizes.rows), jnp.int32),
        stats_tile=plgpu.SMEM((sizes.stages, 2, sizes.rows), jnp.float32),
        keys_here=plgpu.Barrier(num_arrivals=3, num_barriers=warpgroups),
        rows_here=plgpu.Barrier(num_arrivals=4, num_barriers=sizes.stages),
        rows_used=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=sizes.stages),
    )
    like = jax.ShapeDtypeStruct(arrays.k.shape, dtype)
    return tiles.kernel(
        functools.partial(_key_kernel, options, clauses, warpgroups),
        "attention_backward_keys",
        warpgroups,
        (kv_heads, length // (sizes.rows * warpgroups), batch),
        ("head", "tile", "b"),
        (like, like),
        scratch,
    )(
        arrays.q, arrays.k, arrays.v, d_out, stats, arrays.rows, arrays.keys,
        blocks[:, 0], counts[:, 0],
    )  # fmt: skip


def _key_kernel(
    options, clauses, warpgroups, q, k, v, d_out, stats, rows, keys, blocks, counts, dk, dv,
    *, k_tile, v_tile, key_tile, q_tile, d_out_tile, row_tile, stats_tile,
    keys_here, rows_here, rows_used,
):  # fmt: skip
    sizes: tiles.Sizes = options.sizes
    head, tile = lax.axis_index("head"), lax.axis_index("tile")
    b, me = lax.axis_index("b"), lax.axis_index("warpgroup")
    unmasked, seen = counts[b, tile, 0], counts[b, tile, 1]
    shape = (sizes.rows, sizes.rows)

    @pl.when(me < warpgroups)
    def _():
        tiles.share_registers(warpgroups, computes=True)
        mine = pl.ds((tile * warpgroups + me) * sizes.rows, sizes.rows)
        plgpu.copy_gmem_to_smem(k.at[b, mine, head], k_tile.at[me], keys_here.at[me])
        plgpu.copy_gmem_to_smem(v.at[b, mine, head], v_tile.at[me], keys_here.at[me])
        plgpu.copy_gmem_to_smem(keys.at[b, :, mine], key_tile.at[me], keys_here.at[me])
        plgpu.barrier_wait(keys_here.at[me])
        written = load_with_layout(key_tile.at[me, tiles.KEY_AT["written"]], tiles.COLUMN)
        tiles.clean(k_tile.at[me], written)
        tiles.clean(v_tile.at[me], written)
        plgpu.commit_smem()

        def step(n, carry, masked):
            sum_k, sum_v = carry
            slot = lax.rem(n, jnp.int32(sizes.stages))
            plgpu.barrier_wait(rows_here.at[slot])

            def stat(n):
                values = load_with_layout(stats_tile.at[slot, n], tiles.LINE)
                return tiles.by_column(values, shape)

            scores = tiles.product(k_tile.at[me], q_tile.at[slot].transpose((1, 0)), shape)
            scores = tiles.scores(options, scores)
            chance = jnp.exp2(scores * tiles.LOG2_E - stat(_LOG_TOTAL))
            if masked:
                visible = tiles.visible(
                    clauses,
                    lambda f: tiles.by_column(
                        load_with_layout(row_tile.at[slot, f], tiles.LINE), shape
                    ),
                    lambda f: tiles.by_row(
                        load_with_layout(key_tile.at[me, f], tiles.COLUMN), shape
                    ),
                )
                chance = jnp.where(visible, chance, 0.0)
            sum_v = tiles.add_product(sum_v, chance.astype(v.dtype), d_out_tile.at[slot])
            d_chance = tiles.product(v_tile.at[me], d_out_tile.at[slot].transpose((1, 0)), shape)
            slope = _slope(options, chance, d_chance, scores, stat(_DELTA))
            sum_k = tiles.add_product(sum_k, slope.astype(k.dtype), q_tile.at[slot])
            tiles.release(rows_used.at[slot])
            return sum_k, sum_v

        carry = 2 * (tiles.full((sizes.rows, k.shape[3]), 0.0),)
        carry = lax.fori_loop(0, unmasked, functools.partial(step, masked=False), carry)
        carry = lax.fori_loop(unmasked, seen, functools.partial(step, masked=True), carry)
        sum_k, sum_v = carry
        k_tile[me] = (sum_k * options.scale).astype(dk.dtype)
        v_tile[me] = sum_v.astype(dv.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_tile.at[me], dk.at[b, mine, head])
        plgpu.copy_smem_to_gmem(v_tile.at[me], dv.at[b, mine, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == warpgroups)
    def _():
        tiles.share_registers(warpgroups, computes=False)

        @pl.loop(0, seen)
        def _(n):
            slot = lax.rem(n, jnp.int32(sizes.stages))
            at = pl.ds(lax.div(blocks[b, tile, n], jnp.int32(2)) * sizes.rows, sizes.rows)
            pl.when(n >= sizes.stages)(lambda: plgpu.barrier_wait(rows_used.at[slot]))
            here = rows_here.at[slot]
            plgpu.copy_gmem_to_smem(q.at[b, at, head], q_tile.at[slot], here)
            plgpu.copy_gmem_to_smem(d_out.at[b, at, head], d_out_tile.at[slot], here)
            plgpu.copy_gmem_to_smem(rows.at[b, :, at], row_tile.at[slot], here)
            plgpu.copy_gmem_to_smem(stats.at[b, head, :, at], stats_tile.at[slot], here)
