"""Paged attention as a Pallas kernel for Triton: GPUs before Hopper, float32, odd sizes.

JAX deprecates this lowering: nothing imports this module but the op's table. A program owns a block
of rows of one key/value head and walks its share of the row's tiles of keys. The block table gives
each key its address, one by one, so that a tile may span several blocks and a block several tiles,
and keys that nobody sees are not loaded.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..attention.flash import FLOOR, Options, fold, merge_splits, unfold
from ..attention.pallas_triton import dot, make_scores, power
from ..dispatch import refuse_platform
from ..pallas_common import pad_axis, round_up
from . import shapes
from .plan import Plan, shares


class _Sizes(NamedTuple):
    """Rows of a block, keys of a tile, and programs that share the keys of a row."""

    rows: int
    keys: int
    parts: int


def supports(q, k_pool, v_pool, plan, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del v_pool, plan
    if (reason := refuse_platform("gpu")) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; the kernel takes bfloat16 or float32"
    if q.shape[3] > shapes.TRITON_HEAD_MAX:
        return f"H is {q.shape[3]}; the kernel takes at most {shapes.TRITON_HEAD_MAX}"
    if k_pool.size >= 2**31:
        return f"the pool has {k_pool.size} elements; the kernel counts them in 32 bits"
    return None


def run(q, k_pool, v_pool, plan: Plan, *, scale, soft_cap):
    """Runs the kernel. Arguments and results as in `reference`."""
    batch, queries, heads, _ = q.shape
    block, kv_heads = k_pool.shape[1:3]
    groups = heads // kv_heads
    rows = min(shapes.TRITON_ROWS, power(queries * groups))
    capacity = plan.table.shape[1] * block
    keys = min(shapes.TRITON_KEYS, power(capacity))
    programs = batch * kv_heads * -(-queries * groups // rows)
    parts = max(1, min(-(-shapes.GPU_PROGRAMS // programs), -(-capacity // keys)))
    options = Options(scale, soft_cap, groups, _Sizes(rows, keys, parts))
    out, log_total = _call(options, fold(q, kv_heads), k_pool, v_pool, plan)
    return unfold(out.astype(q.dtype), log_total, q.shape)


def _call(options: Options, q, k_pool, v_pool, plan: Plan):
    """The kernel on q (B R K H); returns (B R K H) and (B K R)."""
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    parts, width, padded = sizes.parts, power(head_dim), round_up(length, sizes.rows)
    q = pad_axis(pad_axis(q, 3, width), 1, padded)
    row = jnp.stack([jnp.repeat(v, options.groups, axis=1) for v in (plan.lo, plan.hi)], axis=1)
    row = pad_axis(row, 2, padded, -1)  # a row of padding sees nothing
    # Loads are of powers of two: the number of a share's first tile, and the one behind its last.
    span = jnp.stack(shares(plan, sizes.keys, parts), axis=2)

    def spec(shape, index):
        return pl.BlockSpec(
            shape, lambda i, h, part: index(i, h, part, lax.div(part, jnp.int32(parts)))
        )

    pool = spec((*k_pool.shape[:2], None, head_dim), lambda i, h, part, b: (0, 0, h, 0))
    out, log_total = pl.pallas_call(
        functools.partial(_kernel, options),
        out_shape=(
            jax.ShapeDtypeStruct((batch * parts, padded, kv_heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch * parts, kv_heads, padded), jnp.float32),
        ),
        grid=(padded // sizes.rows, kv_heads, batch * parts),
        in_specs=(
            spec((None, sizes.rows, None, width), lambda i, h, part, b: (b, i, h, 0)),
            pool,
            pool,
            spec((None, plan.table.shape[1]), lambda i, h, part, b: (b, 0)),
            spec((None, 2, sizes.rows), lambda i, h, part, b: (b, 0, i)),
            spec((None, 2), lambda i, h, part, b: (part, 0)),
            spec((None, 2), lambda i, h, part, b: (b, 0)),
        ),
        out_specs=(
            spec((None, sizes.rows, None, width), lambda i, h, part, b: (part, i, h, 0)),
            spec((None, None, sizes.rows), lambda i, h, part, b: (part, h, i)),
        ),
        compiler_params=pltriton.CompilerParams(
            num_warps=shapes.TRITON_WARPS, num_stages=shapes.TRITON_STAGES
        ),
        name="paged_attention",
    )(
        q,
        k_pool,
        v_pool,
        plan.table,
        row,
        span.reshape(-1, 2),
        jnp.stack((plan.start, plan.stop), axis=1),
    )
    out, log_total = out[:, :length, :, :head_dim], log_total[:, :, :length]
    return merge_splits(
        out.reshape(batch, parts, *out.shape[1:]),
        log_total.reshape(batch, parts, *log_total.shape[1:]),
    )


def _kernel(options: Options, q, k_pool, v_pool, table, row, span, seen, out, log_total):
    sizes: _Sizes = options.sizes
    queries = q[...]
    width, block = queries.shape[1], k_pool.shape[1]
    lo, hi = row[0, :][:, None], row[1, :][:, None]
    start, stop = seen[0], seen[1]
    lane = jnp.arange(width, dtype=jnp.int32)[None, :]

    def step(n, carry):
        total_v, peak, total = carry
        position = n * sizes.keys + jnp.arange(sizes.keys, dtype=jnp.int32)
        read = (start <= position) & (position < stop)
        column = lax.div(position, jnp.int32(block))
        page = pltriton.load(table.at[column], mask=read, other=0)[:, None]
        slot = lax.rem(position, jnp.int32(block))[:, None]
        # Only what somebody sees is loaded, zeros in place of the rest: that memory may hold NaN.
        there = read[:, None] & (lane < k_pool.shape[2])

        def load(pool):
            zero = jnp.zeros((), pool.dtype)
            return pltriton.load(pool.at[page, slot, lane], mask=there, other=zero)

        visible = (lo <= position[None, :]) & (position[None, :] <= hi)
        score = jnp.where(visible, make_scores(options, queries, load(k_pool)), FLOOR)
        now = jnp.maximum(peak, jnp.max(score, axis=1))
        weight = jnp.where(visible, jnp.exp(score - now[:, None]), 0.0)
        fade = jnp.exp(peak - now)
        total = total * fade + jnp.sum(weight, axis=1)
        values = load(v_pool)
        total_v = total_v * fade[:, None] + dot(weight.astype(values.dtype), values)
        return total_v, now, total

    carry = (
        jnp.zeros(queries.shape, jnp.float32),
        jnp.full((sizes.rows,), FLOOR, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
    )
    total_v, peak, total = lax.fori_loop(span[0], span[1], step, carry)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out[...] = total_v / safe[:, None]
    log_total[...] = jnp.where(some, jnp.log(safe) + peak, -jnp.inf)
