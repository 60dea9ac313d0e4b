"""Flash attention as Pallas kernels for TPUs (Mosaic), forward and backward.

The forward grid is (row of the batch and part of the keys, head, block of rows, block of keys),
blocks of keys innermost: the running maximum, denominator and output of a block of rows wait in
scratch memory. Bounds of the mask's vectors are prefetched as scalars: a block of keys that nobody
may see is neither computed nor, outside the span of those that somebody may see, copied. Heads lie
side by side on the lanes, (B R K*H), as the projections wrote them: nothing is transposed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..dispatch import refuse_platform
from ..pallas_common import pad_axis, round_up
from . import rows as rules
from . import shapes
from .flash import FLOOR, Kernels, Options, flash_attention, merge_splits, split_count
from .mask import AttentionMask
from .rows import BOUNDS, Clauses

_PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
)


class _Sizes(NamedTuple):
    """Rows and keys of a block, rows of one in the backward pass, lanes, parts of the keys."""

    rows: int
    backward_rows: int
    keys: int
    lanes: int
    splits: int


class _Block(NamedTuple):
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


class _Arrays(NamedTuple):
    """A call's arrays in whole blocks, and the scalars that kernels are steered by."""

    block: _Block
    q_bounds: Array  # B q 8
    k_bounds: Array  # B k 8


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
    backward = min(shapes.TPU_ROWS, round_up(length, lanes))
    sizes = _Sizes(rows, backward, keys, lanes, splits)
    options = Options(float(scale), soft_cap, groups, sizes)
    return flash_attention(KERNELS, options, q, k, v, mask)


def _arrays(options, rows, q, k, v, mask, d_out=None, stats=None) -> _Arrays:
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
    block = _Block(
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
    return _Arrays(
        block, rules.row_bounds(rule.rows, rows), rules.key_bounds(rule.keys, sizes.keys)
    )


def _specs(block: _Block, sizes: _Sizes, rows: int, width: int, at) -> _Block:
    """Block specs; `at` maps a grid index to (b, head, block of rows, block of keys)."""

    def spec(shape, which):
        return pl.BlockSpec(shape, lambda *index: which(*at(*index)))

    by_row = spec((None, rows, width), lambda b, h, i, j: (b, i, h))
    by_key = spec((None, sizes.keys, width), lambda b, h, i, j: (b, j, h))
    specs = _Block(
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
    return _Block(*(None if v is None else s for v, s in zip(block, specs, strict=True)))


def _within(index, first, last):
    """The index, or the nearest inside the span: a block that is not needed is not copied."""
    return jnp.maximum(jnp.minimum(jnp.maximum(index, first), last), 0)


def _bounds(ref, at):
    return [ref[at * BOUNDS + n] for n in range(BOUNDS)]


def _when_seen(q_bounds, k_bounds, clauses: Clauses, step) -> None:
    """Calls `step(masked)` if somebody may see something; masked is False if all see all."""
    some = rules.may_see(q_bounds, k_bounds)
    if clauses.tree:
        pl.when(some)(functools.partial(step, True))
        return
    every = rules.sees_all(q_bounds, k_bounds)
    pl.when(some & every)(functools.partial(step, False))
    pl.when(some & ~every)(functools.partial(step, True))


def _dot(a, b, contract) -> Array:
    """A product summed in float32; float32 factors are not rounded to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _load(block: _Block, masked: bool):
    """Keys and values; zeros where nothing was written, for that memory may hold NaN."""
    k, v = block.k[...], block.v[...]
    if masked:
        written = block.written[...] != 0
        k, v = jnp.where(written, k, jnp.zeros_like(k)), jnp.where(written, v, jnp.zeros_like(v))
    return k, v


def _scores(options: Options, q, k) -> Array:
    scores = _dot(q, k, (1, 1)) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


def _visible(block: _Block, clauses: Clauses) -> Array:
    row, key = block.row[...], block.key[...]

    def column(name):
        at = rules.ROW_FIELDS.index(name)
        return row[:, at : at + 1]

    def line(name):
        at = rules.KEY_FIELDS.index(name)
        return key[at : at + 1, :]

    return rules.visible(clauses, column, line, block.tree[...] if clauses.tree else None)


def _forward(options: Options, q, k, v, mask: AttentionMask):
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    arrays = _arrays(options, sizes.rows, q, k, v, mask)
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
            jax.lax.rem(bp, parts) * keys + _within(j, first[span], last[span]),
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
            in_specs=(_specs(block, sizes, sizes.rows, width, at),),
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
        compiler_params=_PARAMETERS,
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
        k, v = _load(block, masked)
        scores = _scores(options, block.q[...], k)
        if masked:
            seen = _visible(block, clauses)
            scores = jnp.where(seen, scores, FLOOR)
        before = peak[...]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weight = jnp.exp(scores - now)
        if masked:
            weight = jnp.where(seen, weight, 0.0)
        fade = jnp.exp(before - now)
        total[...] = total[...] * fade + jnp.sum(weight, axis=1, keepdims=True)
        total_v[...] = total_v[...] * fade + _dot(weight.astype(v.dtype), v, (1, 0))
        peak[...] = now

    _when_seen(
        _bounds(q_bounds, b * rows + i),
        _bounds(k_bounds, (b * parts + part) * keys + j),
        clauses,
        step,
    )

    @pl.when(j == keys - 1)
    def _():
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1.0)
        out[...] = (total_v[...] / safe).astype(out.dtype)
        log_total[...] = jnp.where(some, jnp.log(safe) + peak[...], -jnp.inf)


def _backward(options: Options, q, k, v, mask: AttentionMask, d_out, log_total, delta):
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    stats = jnp.stack((log_total, delta), axis=3)
    arrays = _arrays(options, sizes.backward_rows, q, k, v, mask, d_out, stats)
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
                in_specs=(_specs(block, sizes, sizes.backward_rows, width, at),),
                out_specs=tuple(pl.BlockSpec(shape, index) for _, shape, index in outs),
                scratch_shapes=tuple(pltpu.VMEM((n, width), jnp.float32) for n in scratch),
            ),
            compiler_params=_PARAMETERS,
            name=name,
        )(*(s.reshape(-1) for s in spans), *flat, block)

    def along_keys(b, h, i, j, first, last, *_):
        return b, h, i, _within(j, first[b * rows + i], last[b * rows + i])

    def along_rows(b, h, j, i, first, last, *_):
        return b, h, _within(i, first[b * keys + j], last[b * keys + j]), j

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
    k, v = _load(block, masked)
    scores = _scores(options, block.q[...], k)
    stats = block.stats[...]
    chance = jnp.exp(scores - stats[:, 0:1])
    if masked:
        chance = jnp.where(_visible(block, clauses), chance, 0.0)
    slope = chance * (_dot(block.d_out[...], v, (1, 1)) - stats[:, 1:2])
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
        sum_q[...] += _dot(slope.astype(k.dtype), k, (1, 0))

    bounds = _bounds(q_bounds, b * rows + i), _bounds(k_bounds, b * keys + j)
    _when_seen(*bounds, clauses, step)

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
        sum_v[...] += _dot(chance.T.astype(d_out.dtype), d_out, (1, 0))
        sum_k[...] += _dot(slope.T.astype(q.dtype), q, (1, 0))

    bounds = _bounds(q_bounds, b * rows + i), _bounds(k_bounds, b * keys + j)
    _when_seen(*bounds, clauses, step)

    @pl.when(i == rows - 1)
    def _():
        dk[...] = sum_k[...].astype(dk.dtype)
        dv[...] = sum_v[...].astype(dv.dtype)


KERNELS = Kernels(_forward, _backward)
