"""The backward pass of flash attention on TPUs: one kernel for dq, one for dk and dv."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..pallas_common import round_up
from . import pallas_tpu_tiles as tiles
from . import rows as rules
from .flash import Options
from .mask import AttentionMask


def backward(options: Options, q, k, v, mask: AttentionMask, d_out, log_total, delta):
    """See `flash.Kernels`."""
    sizes: tiles.Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    stats = jnp.stack((log_total, delta), axis=3)
    arrays = tiles.arrays(options, sizes.backward_rows, q, k, v, mask, d_out, stats)
    block, width = arrays.block, round_up(head_dim, sizes.lanes)
    rows = block.q.shape[1] // sizes.backward_rows
    keys = block.k.shape[1] // sizes.keys
    clauses = rules.clauses_of(mask)
    q_bounds, k_bounds = (jnp.moveaxis(v, 2, 0) for v in (arrays.q_bounds, arrays.k_bounds))
    seen = rules.may_see(q_bounds[:, :, :, None], k_bounds[:, :, None, :])
    flat = [s.reshape(-1) for s in (arrays.q_bounds, arrays.k_bounds)]

    def call(kernel, grid, at, spans, outs, scratch, name):
        return pl.pallas_call(
            functools.partial(kernel, options, clauses),
            out_shape=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o, _, _ in outs),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=grid,
                in_specs=(tiles.specs(block, sizes, sizes.backward_rows, width, at),),
                out_specs=tuple(pl.BlockSpec(shape, index) for _, shape, index in outs),
                scratch_shapes=tuple(pltpu.VMEM((n, width), jnp.float32) for n in scratch),
            ),
            compiler_params=tiles.PARAMETERS,
            name=name,
        )(*(s.reshape(-1) for s in spans), *flat, block)

    def along_keys(b, h, i, j, first, last, *_):
        return b, h, i, tiles.within(j, first[b * rows + i], last[b * rows + i])

    def along_rows(b, h, j, i, first, last, *_):
        return b, h, tiles.within(i, first[b * keys + j], last[b * keys + j]), j

    def index(b, h, n, *_):
        return b, n, h

    by_row, by_key = (None, sizes.backward_rows, width), (None, sizes.keys, width)
    (dq,) = call(
        _query_kernel,
        (batch, kv_heads, rows, keys),
        along_keys,
        rules.span_of(seen),
        ((block.q, by_row, index),),
        (sizes.backward_rows,),
        "attention_backward_queries",
    )
    dk, dv = call(
        _key_kernel,
        (batch, kv_heads, keys, rows),
        along_rows,
        rules.span_of(seen.swapaxes(1, 2)),
        ((block.k, by_key, index), (block.v, by_key, index)),
        (sizes.keys, sizes.keys),
        "attention_backward_keys",
    )

    def shaped(x, size):
        return x.reshape(batch, -1, kv_heads, width)[:, :size, :, :head_dim]

    return shaped(dq, length), shaped(dk, k.shape[1]), shaped(dv, k.shape[1])


def _recompute(options, clauses, block, masked):
    """k, the probabilities and the gradient of the scaled scores, each (rows, keys)."""
    k, v = tiles.load(block, masked)
    scores = tiles.scores(options, block.q[...], k)
    stats = block.stats[...]
    chance = jnp.exp(scores - stats[:, 0:1])
    if masked:
        chance = jnp.where(tiles.visible(block, clauses), chance, 0.0)
    slope = chance * (tiles.dot(block.d_out[...], v, (1, 1)) - stats[:, 1:2])
    if options.soft_cap is not None:
        slope = slope * (1.0 - jnp.square(scores / options.soft_cap))
    return k, chance, slope * options.scale


def _query_kernel(options, clauses, first, last, q_bounds, k_bounds, block, dq, sum_q):
    del first, last
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    rows, keys = pl.num_programs(2), pl.num_programs(3)

    @pl.when(j == 0)
    def _():
        sum_q[...] = jnp.zeros_like(sum_q)

    def step(masked):
        k, _, slope = _recompute(options, clauses, block, masked)
        sum_q[...] += tiles.dot(slope.astype(k.dtype), k, (1, 0))

    bounds = tiles.bounds(q_bounds, b * rows + i), tiles.bounds(k_bounds, b * keys + j)
    tiles.when_seen(*bounds, clauses, step)

    @pl.when(j == keys - 1)
    def _():
        dq[...] = sum_q[...].astype(dq.dtype)


def _key_kernel(options, clauses, first, last, q_bounds, k_bounds, block, dk, dv, sum_k, sum_v):
    del first, last
    b, j, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    keys, rows = pl.num_programs(2), pl.num_programs(3)

    @pl.when(i == 0)
    def _():
        sum_k[...] = jnp.zeros_like(sum_k)
        sum_v[...] = jnp.zeros_like(sum_v)

    def step(masked):
        _, chance, slope = _recompute(options, clauses, block, masked)
        q, d_out = block.q[...], block.d_out[...]
        sum_v[...] += tiles.dot(chance.T.astype(d_out.dtype), d_out, (1, 0))
        sum_k[...] += tiles.dot(slope.T.astype(q.dtype), q, (1, 0))

    bounds = tiles.bounds(q_bounds, b * rows + i), tiles.bounds(k_bounds, b * keys + j)
    tiles.when_seen(*bounds, clauses, step)

    @pl.when(i == rows - 1)
    def _():
        dk[...] = sum_k[...].astype(dk.dtype)
        dv[...] = sum_v[...].astype(dv.dtype)
