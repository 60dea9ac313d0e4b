"""Flash attention as Pallas kernels for Triton: GPUs before Hopper, float32, and trees.

JAX deprecates this lowering: nothing imports this module but the op's table. A program owns a
block of rows (of keys for dk and dv) and walks the list of blocks that it may see
(`rows.block_lists`): first those without a mask, then those with.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from ..dispatch import refuse_platform
from ..pallas_common import pad_axis, round_up
from . import rows as rules
from . import shapes
from .flash import FLOOR, Kernels, Options, flash_attention, merge_splits, split_count
from .mask import AttentionMask
from .rows import Clauses

_ROW_AT = {name: n for n, name in enumerate(rules.ROW_FIELDS)}
_KEY_AT = {name: n for n, name in enumerate(rules.KEY_FIELDS)}


class _Sizes(NamedTuple):
    """Rows and keys of a block, parts of the keys."""

    rows: int
    keys: int
    splits: int


class _Inputs(NamedTuple):
    """A call's arrays in whole blocks; in a kernel, what a program reads of them."""

    q: Any  # B R K H
    k: Any  # B S K H
    v: Any  # B S K H
    row: Any  # B 4 R
    key: Any  # B 5 S
    tree: Any  # B R S, or None
    blocks: Any  # B tiles blocks, of `rows.block_lists`
    counts: Any  # B tiles 2
    d_out: Any = None  # B R K H
    stats: Any = None  # B K 2 R: log_total, delta


def supports(q, k, v, mask, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del v, mask
    if (reason := refuse_platform("gpu")) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; the kernel takes bfloat16 or float32"
    if q.shape[3] > shapes.TRITON_HEAD_MAX:
        return f"H is {q.shape[3]}; the kernel takes at most {shapes.TRITON_HEAD_MAX}"
    if 0 in (*q.shape, *k.shape):
        return f"q {q.shape} and k {k.shape} hold nothing"
    return None


def run(q, k, v, mask, *, scale, soft_cap):
    """Runs the kernels. Arguments and results as in `reference`."""
    groups = q.shape[2] // k.shape[2]
    length = q.shape[1] * groups
    rows = min(shapes.TRITON_ROWS, power(length))
    keys = min(shapes.TRITON_KEYS, power(k.shape[1]))
    splits = 1
    if length <= rows:
        blocks = -(-k.shape[1] // keys)
        splits = split_count(q.shape[0] * k.shape[2], shapes.GPU_PROGRAMS, blocks)
    options = Options(float(scale), soft_cap, groups, _Sizes(rows, keys, splits))
    return flash_attention(KERNELS, options, q, k, v, mask)


def power(size: int) -> int:
    """Returns the least power of two that holds `size` and that a matrix product takes."""
    return max(shapes.TRITON_LEAST, 1 << (size - 1).bit_length())


def _inputs(options, q, k, v, mask, *, splits=1, by_key=False, d_out=None, stats=None) -> _Inputs:
    sizes: _Sizes = options.sizes
    length, keys = round_up(q.shape[1], sizes.rows), round_up(k.shape[1], sizes.keys)
    width = power(q.shape[3])
    rule = rules.mask_rows(mask, options.groups, length, keys)
    blocks, counts = rules.block_lists(
        rules.row_bounds(rule.rows, sizes.rows),
        rules.key_bounds(rule.keys, sizes.keys),
        tree=rule.tree is not None,
        splits=splits,
        by_key=by_key,
    )

    def padded(x, size):
        return None if x is None else pad_axis(pad_axis(x, 3, width), 1, size)

    return _Inputs(
        q=padded(q, length),
        k=padded(k, keys),
        v=padded(v, keys),
        row=rule.rows.swapaxes(1, 2),
        key=rule.keys,
        tree=rule.tree,
        blocks=blocks.reshape(-1, *blocks.shape[2:]),
        counts=counts.reshape(-1, *counts.shape[2:]),
        d_out=padded(d_out, length),
        stats=None if stats is None else pad_axis(stats, 3, length),
    )


def _call(kernel, name, options, clauses, inputs: _Inputs, grid, at_rows, outs):
    """Calls a kernel whose programs own a block of rows, or of keys, at grid index (i, h, b).

    Args:
        kernel: its body.
        name: its name.
        options: the call's.
        clauses: the mask's.
        inputs: its arrays.
        grid: tiles, heads, rows of the batch times parts.
        at_rows: whether a tile is a block of rows; the keys are then read whole, else the rows.
        outs: shape, block shape and index map of each result.
    """
    sizes: _Sizes = options.sizes
    length, keys, width = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[3]
    parts = grid[2] // inputs.q.shape[0]
    tiles = {"rows": sizes.rows if at_rows else length, "keys": keys if at_rows else sizes.keys}

    def spec(shape, index):
        def at(i, h, part):
            tile = {"rows": i if at_rows else 0, "keys": 0 if at_rows else i}
            return index(tile, h, part, lax.div(part, jnp.int32(parts)))

        return pl.BlockSpec(shape, at)

    by_row = spec((None, tiles["rows"], None, width), lambda t, h, _, b: (b, t["rows"], h, 0))
    by_key = spec((None, tiles["keys"], None, width), lambda t, h, _, b: (b, t["keys"], h, 0))
    listed = inputs.blocks.shape[2]
    tile = "rows" if at_rows else "keys"
    specs = _Inputs(
        q=by_row,
        k=by_key,
        v=by_key,
        row=spec((None, len(_ROW_AT), tiles["rows"]), lambda t, h, _, b: (b, 0, t["rows"])),
        key=spec((None, len(_KEY_AT), tiles["keys"]), lambda t, h, _, b: (b, 0, t["keys"])),
        tree=spec(
            (None, tiles["rows"], tiles["keys"]), lambda t, h, _, b: (b, t["rows"], t["keys"])
        ),
        blocks=spec((None, None, listed), lambda t, h, part, b: (part, t[tile], 0)),
        counts=spec((None, None, 2), lambda t, h, part, b: (part, t[tile], 0)),
        d_out=by_row,
        stats=spec((None, None, 2, tiles["rows"]), lambda t, h, _, b: (b, h, 0, t["rows"])),
    )
    specs = _Inputs(*(None if v is None else s for v, s in zip(inputs, specs, strict=True)))
    return pl.pallas_call(
        functools.partial(kernel, options, clauses),
        out_shape=tuple(shape for shape, _, _ in outs),
        grid=grid,
        in_specs=(specs,),
        out_specs=tuple(pl.BlockSpec(block, index) for _, block, index in outs),
        compiler_params=pltriton.CompilerParams(
            num_warps=shapes.TRITON_WARPS, num_stages=shapes.TRITON_STAGES
        ),
        name=name,
    )(inputs)


def dot(a, b) -> Array:
    """A product summed in float32; float32 factors are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def make_scores(options: Options, q, k) -> Array:
    """The scores of rows (rows H) and keys (keys H)."""
    scores = dot(q, k.T) * options.scale
    if options.soft_cap is None:
        return scores
    # tanh by the exponential, which is what Triton has on every card.
    grown = jnp.exp(-2.0 * jnp.abs(scores) / options.soft_cap)
    size = options.soft_cap * (1.0 - grown) / (1.0 + grown)
    return jnp.where(scores < 0, -size, size)


def _load_keys(inputs: _Inputs, at, masked):
    """Keys and values; zeros where nothing was written, for that memory may hold NaN."""
    k, v = inputs.k[at, :], inputs.v[at, :]
    if masked:
        written = (inputs.key[_KEY_AT["written"], at] != 0)[:, None]
        k, v = jnp.where(written, k, jnp.zeros_like(k)), jnp.where(written, v, jnp.zeros_like(v))
    return k, v


def _visible(clauses: Clauses, inputs: _Inputs, rows, keys) -> Array:
    return rules.visible(
        clauses,
        lambda name: inputs.row[_ROW_AT[name], rows][:, None],
        lambda name: inputs.key[_KEY_AT[name], keys][None, :],
        inputs.tree[rows, keys] if clauses.tree else None,
    )


def _walk(inputs: _Inputs, size: int, step, carry):
    """Folds `step(at, carry, masked)` over the blocks of `size` that the program may see."""
    unmasked, seen = inputs.counts[0], inputs.counts[1]

    def visit(masked, n, carry):
        at = pl.ds(lax.div(inputs.blocks[n], jnp.int32(2)) * size, size)
        return step(at, carry, masked)

    carry = lax.fori_loop(0, unmasked, functools.partial(visit, False), carry)
    return lax.fori_loop(unmasked, seen, functools.partial(visit, True), carry)


def _forward(options: Options, q, k, v, mask: AttentionMask):
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    inputs = _inputs(options, q, k, v, mask, splits=sizes.splits)
    padded, width = inputs.q.shape[1], inputs.q.shape[3]
    parts = sizes.splits
    out_type = q.dtype if parts == 1 else jnp.float32
    out, log_total = _call(
        _forward_kernel,
        "attention_forward",
        options,
        rules.clauses_of(mask),
        inputs,
        (padded // sizes.rows, kv_heads, batch * parts),
        True,
        (
            (
                jax.ShapeDtypeStruct((batch * parts, padded, kv_heads, width), out_type),
                (None, sizes.rows, None, width),
                lambda i, h, part: (part, i, h, 0),
            ),
            (
                jax.ShapeDtypeStruct((batch * parts, kv_heads, padded), jnp.float32),
                (None, None, sizes.rows),
                lambda i, h, part: (part, h, i),
            ),
        ),
    )
    out, log_total = out[:, :length, :, :head_dim], log_total[:, :, :length]
    if parts == 1:
        return out, log_total
    out, log_total = merge_splits(
        out.reshape(batch, parts, *out.shape[1:]),
        log_total.reshape(batch, parts, *log_total.shape[1:]),
    )
    return out.astype(q.dtype), log_total


def _forward_kernel(options, clauses, inputs: _Inputs, out, log_total):
    sizes: _Sizes = options.sizes
    q = inputs.q[...]
    everything = slice(None)

    def step(at, carry, masked):
        total_v, peak, total = carry
        k, v = _load_keys(inputs, at, masked)
        scores = make_scores(options, q, k)
        if masked:
            seen = _visible(clauses, inputs, everything, at)
            scores = jnp.where(seen, scores, FLOOR)
        now = jnp.maximum(peak, jnp.max(scores, axis=1))
        weight = jnp.exp(scores - now[:, None])
        if masked:
            weight = jnp.where(seen, weight, 0.0)
        fade = jnp.exp(peak - now)
        total = total * fade + jnp.sum(weight, axis=1)
        total_v = total_v * fade[:, None] + dot(weight.astype(v.dtype), v)
        return total_v, now, total

    carry = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((sizes.rows,), FLOOR, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
    )
    total_v, peak, total = _walk(inputs, sizes.keys, step, carry)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out[...] = (total_v / safe[:, None]).astype(out.dtype)
    log_total[...] = jnp.where(some, jnp.log(safe) + peak, -jnp.inf)


def _backward(options: Options, q, k, v, mask: AttentionMask, d_out, log_total, delta):
    sizes: _Sizes = options.sizes
    batch, length, kv_heads, head_dim = q.shape
    clauses = rules.clauses_of(mask)
    more = {"d_out": d_out, "stats": jnp.stack((log_total, delta), axis=2)}

    def call(kernel, name, inputs, at_rows, like, size, count):
        out = (
            jax.ShapeDtypeStruct(like.shape, like.dtype),
            (None, size, None, like.shape[3]),
            lambda i, h, b: (b, i, h, 0),
        )
        grid = (like.shape[1] // size, kv_heads, batch)
        return _call(kernel, name, options, clauses, inputs, grid, at_rows, (out,) * count)

    inputs = _inputs(options, q, k, v, mask, **more)
    name = "attention_backward_queries"
    (dq,) = call(_query_kernel, name, inputs, True, inputs.q, sizes.rows, 1)
    inputs = _inputs(options, q, k, v, mask, by_key=True, **more)
    name = "attention_backward_keys"
    dk, dv = call(_key_kernel, name, inputs, False, inputs.k, sizes.keys, 2)
    return tuple(
        x[:, :size, :, :head_dim]
        for x, size in zip((dq, dk, dv), (length, *2 * k.shape[1:2]), strict=True)
    )


def _recompute(options, clauses, inputs, masked, q, k, v, d_out, rows, keys):
    """The probabilities and the gradient of the scaled scores, each (rows, keys)."""
    scores = make_scores(options, q, k)
    chance = jnp.exp(scores - inputs.stats[0, rows][:, None])
    if masked:
        chance = jnp.where(_visible(clauses, inputs, rows, keys), chance, 0.0)
    slope = chance * (dot(d_out, v.T) - inputs.stats[1, rows][:, None])
    if options.soft_cap is not None:
        capped = scores / options.soft_cap
        slope = slope * (1.0 - capped * capped)
    return chance, slope * options.scale


def _query_kernel(options, clauses, inputs: _Inputs, dq):
    q, d_out = inputs.q[...], inputs.d_out[...]
    everything = slice(None)

    def step(at, sum_q, masked):
        k, v = _load_keys(inputs, at, masked)
        _, slope = _recompute(options, clauses, inputs, masked, q, k, v, d_out, everything, at)
        return sum_q + dot(slope.astype(k.dtype), k)

    sum_q = _walk(inputs, options.sizes.keys, step, jnp.zeros(q.shape, jnp.float32))
    dq[...] = sum_q.astype(dq.dtype)


def _key_kernel(options, clauses, inputs: _Inputs, dk, dv):
    everything = slice(None)
    k, v = _load_keys(inputs, everything, True)

    def step(at, carry, masked):
        sum_k, sum_v = carry
        q, d_out = inputs.q[at, :], inputs.d_out[at, :]
        chance, slope = _recompute(options, clauses, inputs, masked, q, k, v, d_out, at, everything)
        sum_v = sum_v + dot(chance.T.astype(d_out.dtype), d_out)
        return sum_k + dot(slope.T.astype(q.dtype), q), sum_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    sum_k, sum_v = _walk(inputs, options.sizes.rows, step, (zeros, zeros))
    dk[...], dv[...] = sum_k.astype(dk.dtype), sum_v.astype(dv.dtype)


KERNELS = Kernels(_forward, _backward)
