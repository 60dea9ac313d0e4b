"""The grouped matmul as Pallas kernels for TPUs (Mosaic), forward and backward.

Rows are cut into tiles, and each tile is visited once for every group that has rows in it, in
order. Matrices stay in main memory as separate arrays; a block of a group's matrix is copied when
the first of its visits begins, so a group without rows costs nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from ..dispatch import refuse_platform
from . import shapes

_PARALLEL, _ARBITRARY = "parallel", "arbitrary"
_IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)


class _Visits(NamedTuple):
    """Which tile of rows and which group come at each step; group E stands for no group."""

    group: Int[Array, " V"]
    tile: Int[Array, " V"]
    begin: Int[Array, " E+1"]  # each group's first row
    end: Int[Array, " E+1"]  # and the one behind its last


def supports(x, w, group_sizes) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del group_sizes
    if (reason := refuse_platform("tpu")) is not None:
        return reason
    for index, matrix in enumerate(w):
        if matrix.dtype != w[0].dtype:
            return f"w[{index}] has dtype {matrix.dtype}, w[0] {w[0].dtype}; they have to agree"
    for name, size in zip("DF", w[0].shape, strict=True):
        if size % shapes.TPU_LANES:
            return f"{name} is {size}; the kernel takes multiples of {shapes.TPU_LANES}"
    return None


@jax.custom_vjp
def run(x, w, group_sizes):
    """Same function as the reference. Reverse-mode differentiable in x and w."""
    return _times(x, w, group_sizes, turned=False)


def _forward(x, w, group_sizes):
    return run(x, w, group_sizes), (x, w, group_sizes)


def _backward(saved, dy):
    x, w, group_sizes = saved
    dx = _times(dy, w, group_sizes, turned=True)
    found = _outer(x, dy, group_sizes, [m.dtype for m in w])
    # A group without rows has no visit that would write.
    dw = tuple(jnp.where(n > 0, m, 0) for m, n in zip(found, group_sizes, strict=True))
    return dx, dw, np.zeros(group_sizes.shape, jax.dtypes.float0)


run.defvjp(_forward, _backward)


def _tile_rows(rows: int) -> int:
    """Rows of a tile: fewer for a short batch, in whole tiles of bfloat16."""
    unit = shapes.TPU_SHORTEST
    return min(shapes.TPU_ROWS, -(-rows // unit) * unit)


def _pad_rows(v: Array, tile: int) -> Array:
    more = -v.shape[0] % tile
    return jnp.pad(v, ((0, more), (0, 0))) if more else v


def _visits(group_sizes: Int[Array, " E"], rows: int, tile: int) -> _Visits:
    """Plans the visits to `rows` (whole tiles); there are at most one per tile and one per group.

    The rows behind the last group are a group of their own, so that every tile is visited. Visits
    that are left over come last, to the last tile and for no group.
    """
    groups, tiles = group_sizes.shape[0], rows // tile
    end = jnp.cumsum(group_sizes)
    end = jnp.append(end, jnp.int32(rows))
    begin = jnp.append(jnp.int32(0), end[:-1])
    first = begin // tile
    span = jnp.where(end > begin, (end - 1) // tile - first + 1, 0)
    behind = jnp.cumsum(span)
    index = jnp.arange(tiles + groups, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= behind[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, groups)
    at = first[group] + index - (behind - span)[group]
    return _Visits(group, jnp.minimum(at, tiles - 1), begin, end)


def _rows_of(visits: _Visits, i, tile: int) -> Array:
    """Which rows of the tile belong to the group of visit i, [tile 1]."""
    group = visits.group[i]
    row = visits.tile[i] * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    return (row >= visits.begin[group]) & (row < visits.end[group])


def _changes(values, i, step: int):
    """Whether visit i has another value than the visit before (step -1) or behind it (step 1)."""
    last = values.shape[0] - 1
    edge = i == (0 if step < 0 else last)
    return edge | (values[i] != values[jnp.clip(i + step, 0, last)])


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Contracts one axis of each in float32 of full precision."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())),
        precision=exact, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _divisor(size: int, most: int) -> int:
    """The largest whole number of lanes that divides a side and is not above `most`, if any."""
    lanes = shapes.TPU_LANES
    whole = range(lanes, size + 1, lanes)
    return max(n for n in whole if size % n == 0 and n <= max(most, lanes))


def _times(x: Array, w: tuple, group_sizes: Array, *, turned: bool) -> Array:
    """Each row times its group's matrix, or times its transpose."""
    rows, inner = x.shape
    outer = w[0].shape[0 if turned else 1]
    tile = _tile_rows(rows)
    x = _pad_rows(x, tile)
    visits = _visits(group_sizes, x.shape[0], tile)
    wide = _divisor(outer, shapes.TPU_WIDTH)
    deep = _divisor(inner, shapes.TPU_BLOCK_BYTES // (wide * w[0].dtype.itemsize))
    depth = inner // deep

    def grouped_matmul_times(*refs):
        visits, (x, *matrices), (out, matrix, total) = _Visits(*refs[:4]), refs[4:-3], refs[-3:]
        part, i, k = (pl.program_id(axis) for axis in range(3))
        group = visits.group[i]
        columns, along = pl.ds(part * wide, wide), pl.ds(k * deep, deep)

        # A matrix that is one block deep stays for all visits of its group.
        @pl.when((depth > 1) | _changes(visits.group, i, -1))
        def _():
            for index, source in enumerate(matrices):

                @pl.when(group == index)
                def _(source=source):
                    block = source.at[columns, along] if turned else source.at[along, columns]
                    pltpu.sync_copy(block, matrix)

        @pl.when((k == 0) & _changes(visits.tile, i, -1))
        def _():
            out[...] = jnp.zeros_like(out)

        @pl.when(k == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        @pl.when(group < len(matrices))
        def _():
            total[...] += _dot(x[...], matrix[...].astype(x.dtype), 1, 1 if turned else 0)

        @pl.when((k == depth - 1) & (group < len(matrices)))
        def _():
            inside = _rows_of(visits, i, tile)
            out[...] = jnp.where(inside, total[...].astype(out.dtype), out[...])

    found = pl.pallas_call(
        grouped_matmul_times,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outer), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(outer // wide, visits.group.shape[0], depth),
            in_specs=[
                pl.BlockSpec((tile, deep), lambda part, i, k, group, at, *_: (at[i], k)),
                *[_IN_PLACE] * len(w),
            ],
            out_specs=pl.BlockSpec((tile, wide), lambda part, i, k, group, at, *_: (at[i], part)),
            scratch_shapes=[
                pltpu.VMEM((wide, deep) if turned else (deep, wide), w[0].dtype),
                pltpu.VMEM((tile, wide), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(_PARALLEL, _ARBITRARY, _ARBITRARY)
        ),
        name="grouped_matmul_times",
    )(*visits, x, *w)
    return found[:rows]


def _outer(x: Array, dy: Array, group_sizes: Array, dtypes: list) -> tuple:
    """Each group's sum over its rows of x_t dy_t^T; of a group without rows, anything."""
    inner, outer = x.shape[1], dy.shape[1]
    tile = _tile_rows(x.shape[0])
    x, dy = _pad_rows(x, tile), _pad_rows(dy, tile)
    visits = _visits(group_sizes, x.shape[0], tile)
    wide = _divisor(outer, shapes.TPU_WIDTH)
    deep = _divisor(inner, shapes.TPU_BLOCK_BYTES // (wide * 4))

    def grouped_matmul_outer(*refs):
        visits, (x, dy), (*matrices, total, cast) = _Visits(*refs[:4]), refs[4:6], refs[6:]
        row, column, i = (pl.program_id(axis) for axis in range(3))
        group = visits.group[i]

        @pl.when(_changes(visits.group, i, -1))
        def _():
            total[...] = jnp.zeros_like(total)

        @pl.when(group < len(matrices))
        def _():
            # Both are masked: what other rows hold may be NaN.
            inside = _rows_of(visits, i, tile)
            total[...] += _dot(jnp.where(inside, x[...], 0), jnp.where(inside, dy[...], 0), 0, 0)

        @pl.when(_changes(visits.group, i, 1))
        def _():
            cast[...] = total[...].astype(cast.dtype)
            for index, target in enumerate(matrices):

                @pl.when(group == index)
                def _(target=target):
                    here = pl.ds(row * deep, deep), pl.ds(column * wide, wide)
                    pltpu.sync_copy(cast, target.at[here])

    out = pl.pallas_call(
        grouped_matmul_outer,
        out_shape=tuple(jax.ShapeDtypeStruct((inner, outer), dtype) for dtype in dtypes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(inner // deep, outer // wide, visits.group.shape[0]),
            in_specs=[
                pl.BlockSpec((tile, deep), lambda r, c, i, group, at, *_: (at[i], r)),
                pl.BlockSpec((tile, wide), lambda r, c, i, group, at, *_: (at[i], c)),
            ],
            out_specs=tuple([_IN_PLACE] * len(dtypes)),
            scratch_shapes=[
                pltpu.VMEM((deep, wide), jnp.float32),
                pltpu.VMEM((deep, wide), dtypes[0]),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(_PARALLEL, _PARALLEL, _ARBITRARY)
        ),
        name="grouped_matmul_outer",
    )(*visits, x, dy)
    return tuple(out)
