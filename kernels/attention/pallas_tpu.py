"""Flash attention as Pallas kernels for TPUs (Mosaic), forward and backward.

The forward grid is (row of the batch and part of the keys, head, block of rows, block of keys),
blocks of keys innermost: the running maximum, denominator and output of a block of rows wait in
scratch memory. Bounds of the mask's vectors are prefetched as scalars: a block of keys that nobody
may see is neither computed nor, outside the span of those that somebody may see, copied. Heads lie
side by side on the lanes, (B R K*H), as the projections wrote them: nothing is transposed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import refuse_platform
from ..pallas_common import round_up
from . import pallas_tpu_tiles as tiles
from . import rows as rules
from . import shapes
from .flash import FLOOR, Kernels, Options, flash_attention, merge_splits, split_count
from .mask import AttentionMask
from .pallas_tpu_backward import backward


def supports(q, k, v, mask, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del v, mask
    if (reason := refuse_platform("tpu")) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; the kernel takes bfloat16 or float32"
    if 0 in (*q.shape, *k.shape):
        return f"q {q.shape} and k {k.shape} hold nothing"
    return None


def run(q, k, v, mask, *, scale, soft_cap):
    """Runs the kernels. Arguments and results as in `reference`."""
    groups = q.shape[2] // k.shape[2]
    length = q.shape[1] * groups
    unit, lanes = shapes.TPU_ROW_UNIT, shapes.TPU_LANES
    rows = min(shapes.TPU_ROWS, round_up(length, unit))
    keys = min(shapes.TPU_KEYS, round_up(k.shape[1], lanes))
    splits = 1
    if length <= rows:
        programs = q.shape[0] * k.shape[2]
        splits = split_count(programs, shapes.TPU_PROGRAMS, -(-k.shape[1] // keys))
    # A block of rows is turned on its side in the backward pass, which takes whole lanes.
    backward_rows = min(shapes.TPU_ROWS, round_up(length, lanes))
    sizes = tiles.Sizes(rows, backward_rows, keys, lanes, splits)
    options = Options(float(scale), soft_cap, groups, sizes)
    return flash_attention(KERNELS, options, q, k, v, mask)


def _forward(options: Options, q, k, v, mask: AttentionMask):
    sizes: tiles.Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    arrays = tiles.arrays(options, sizes.rows, q, k, v, mask)
    block, width = arrays.block, round_up(head_dim, sizes.lanes)
    padded = block.q.shape[1]
    rows, parts = padded // sizes.rows, sizes.splits
    keys = block.k.shape[1] // sizes.keys // parts
    first, last = rules.spans(arrays.q_bounds, arrays.k_bounds, parts)

    def at(bp, h, i, j, first, last, *_):
        span = bp * rows + i
        return (
            jax.lax.div(bp, parts),
            h,
            i,
            jax.lax.rem(bp, parts) * keys + tiles.within(j, first[span], last[span]),
        )

    def result(shape, which):
        return pl.BlockSpec(shape, lambda bp, h, i, j, *_: which(bp, h, i))

    out, log_total = pl.pallas_call(
        functools.partial(_forward_kernel, options, rules.clauses_of(mask)),
        out_shape=(
            jax.ShapeDtypeStruct(
                (batch * parts, *block.q.shape[1:]), q.dtype if parts == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((batch * parts, kv_heads, padded, 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch * parts, kv_heads, rows, keys),
            in_specs=(tiles.specs(block, sizes, sizes.rows, width, at),),
            out_specs=(
                result((None, sizes.rows, width), lambda b, h, i: (b, i, h)),
                result((None, None, sizes.rows, 1), lambda b, h, i: (b, h, i, 0)),
            ),
            scratch_shapes=(
                pltpu.VMEM((sizes.rows, width), jnp.float32),
                pltpu.VMEM((sizes.rows, 1), jnp.float32),
                pltpu.VMEM((sizes.rows, 1), jnp.float32),
            ),
        ),
        compiler_params=tiles.PARAMETERS,
        name="attention_forward",
    )(*(s.reshape(-1) for s in (first, last, arrays.q_bounds, arrays.k_bounds)), block)
    out = out.reshape(-1, padded, kv_heads, width)[:, :length, :, :head_dim]
    log_total = log_total[:, :, :length, 0]
    if parts == 1:
        return out, log_total
    out, log_total = merge_splits(
        out.reshape(batch, parts, *out.shape[1:]),
        log_total.reshape(batch, parts, *log_total.shape[1:]),
    )
    return out.astype(q.dtype), log_total


def _forward_kernel(
    options, clauses, first, last, q_bounds, k_bounds, block, out, log_total, total_v, peak, total
):
    del first, last
    bp, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    rows, keys, parts = pl.num_programs(2), pl.num_programs(3), options.sizes.splits
    b, part = jax.lax.div(bp, parts), jax.lax.rem(bp, parts)

    @pl.when(j == 0)
    def _():
        total_v[...] = jnp.zeros_like(total_v)
        peak[...] = jnp.full_like(peak, FLOOR)
        total[...] = jnp.zeros_like(total)

    def step(masked):
        k, v = tiles.load(block, masked)
        scores = tiles.scores(options, block.q[...], k)
        if masked:
            seen = tiles.visible(block, clauses)
            scores = jnp.where(seen, scores, FLOOR)
        before = peak[...]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weight = jnp.exp(scores - now)
        if masked:
            weight = jnp.where(seen, weight, 0.0)
        fade = jnp.exp(before - now)
        total[...] = total[...] * fade + jnp.sum(weight, axis=1, keepdims=True)
        total_v[...] = total_v[...] * fade + tiles.dot(weight.astype(v.dtype), v, (1, 0))
        peak[...] = now

    tiles.when_seen(
        tiles.bounds(q_bounds, b * rows + i),
        tiles.bounds(k_bounds, (b * parts + part) * keys + j),
        clauses,
        step,
    )

    @pl.when(j == keys - 1)
    def _():
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1.0)
        out[...] = (total_v[...] / safe).astype(out.dtype)
        log_total[...] = jnp.where(some, jnp.log(safe) + peak[...], -jnp.inf)


KERNELS = Kernels(_forward, backward)
