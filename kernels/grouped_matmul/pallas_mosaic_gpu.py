"""The grouped matmul as Pallas kernels for Hopper and newer GPUs (Mosaic GPU), in bfloat16.

Rows are copied so that each group begins a tile of its own; a tile then belongs to one group, and a
block of the result to one warpgroup. Matrices stay in main memory as separate arrays: those of
groups without rows are never read. Blocks arrive several at a time in a ring of shared memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from ..compat import transposed
from ..dispatch import refuse_platform
from . import shapes

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_TILE = 64  # rows of a tile of WGMMA, and values of a row that lie together in shared memory
_WIDE = 128  # columns of a block of the result


class _Tiles(NamedTuple):
    """Where rows lie when each group begins a tile."""

    group: Int[Array, " Z"]  # of each tile; E where a tile is left over
    first: Int[Array, " E"]  # each group's first tile
    count: Int[Array, " E"]  # and how many it has
    source: Int[Array, " R"]  # the row that lies in each place
    filled: Bool[Array, " R"]  # whether one does
    place: Int[Array, " T"]  # the place of each row
    inside: Bool[Array, " T"]  # whether it has a group


def supports(x, w, group_sizes) -> str | None:
    """Returns why the kernel cannot run, or None."""
    del group_sizes
    if (reason := refuse_platform("gpu", 9.0)) is not None:
        return reason
    for name, v in (("x", x), *((f"w[{i}]", matrix) for i, matrix in enumerate(w))):
        if v.dtype != jnp.bfloat16:
            return f"{name} has dtype {v.dtype}; the kernel takes bfloat16"
    for name, size in zip("DF", w[0].shape, strict=True):
        if size % _WIDE:
            return f"{name} is {size}; the kernel takes multiples of {_WIDE}"
    if len(w) > shapes.GPU_MAX_GROUPS:
        return f"there are {len(w)} groups; the kernel takes at most {shapes.GPU_MAX_GROUPS}"
    return None


@jax.custom_vjp
def run(x, w, group_sizes):
    """Same function as the reference. Reverse-mode differentiable in x and w.

    Memory beside inputs and results: a copy of x and of y, and of their cotangents.
    """
    tiles = _arrange(group_sizes, x.shape[0])
    return _collect(_times(_spread(x, tiles), w, tiles, turned=False), tiles)


def _forward(x, w, group_sizes):
    return run(x, w, group_sizes), (x, w, group_sizes)


def _backward(saved, dy):
    x, w, group_sizes = saved
    tiles = _arrange(group_sizes, x.shape[0])
    spread = _spread(dy, tiles)
    dx = _collect(_times(spread, w, tiles, turned=True), tiles)
    dw = _outer(_spread(x, tiles), spread, tiles, len(w))
    return dx, dw, np.zeros(group_sizes.shape, jax.dtypes.float0)


run.defvjp(_forward, _backward)


def _arrange(group_sizes: Int[Array, " E"], rows: int) -> _Tiles:
    """Plans the places; there is room for every row and for one partly filled tile per group."""
    groups = group_sizes.shape[0]
    room = -(-rows // _TILE) + groups
    count = (group_sizes + _TILE - 1) // _TILE
    behind, end = jnp.cumsum(count), jnp.cumsum(group_sizes)
    first, begin = behind - count, end - group_sizes

    def find(borders, size):
        """The group of each tile or row: how many groups end before it."""
        index = jnp.arange(size, dtype=jnp.int32)
        return index, jnp.sum(index[:, None] >= borders[None, :], axis=1, dtype=jnp.int32)

    _, group = find(behind, room)
    own = jnp.minimum(jnp.repeat(group, _TILE), groups - 1)
    within = jnp.arange(room * _TILE, dtype=jnp.int32) - first[own] * _TILE
    filled = (jnp.repeat(group, _TILE) < groups) & (within < group_sizes[own])
    row, of_row = find(end, rows)
    inside = of_row < groups
    of_row = jnp.minimum(of_row, groups - 1)
    return _Tiles(
        group=group,
        first=first,
        count=count,
        source=jnp.where(filled, begin[own] + within, 0),
        filled=filled,
        place=jnp.where(inside, first[of_row] * _TILE + row - begin[of_row], 0),
        inside=inside,
    )


def _spread(v: Array, tiles: _Tiles) -> Array:
    """Puts every row in its place, and 0 where none belongs."""
    return jnp.where(tiles.filled[:, None], v[tiles.source], 0)


def _collect(v: Array, tiles: _Tiles) -> Array:
    """Fetches every row from its place; 0 for rows of no group."""
    return jnp.where(tiles.inside[:, None], v[tiles.place], 0)


def _room(rows: int, columns: int, slots: int = 1) -> plgpu.SMEM:
    """Shared memory for matrices in the order in which tensor cores read them."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    shape = (slots, rows, columns) if slots > 1 else (rows, columns)
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _ring(count, fetch: Callable, factors: Callable, barrier) -> Array:
    """Sums `count` products, while the factors of the next ones are under way.

    Args:
        count: how many; a number or a traced one.
        fetch: (index, slot) starts the copies of the two factors; they arrive at the slot's
            barrier.
        factors: (slot) -> the two factors.
        barrier: one for each slot.
    """
    slots = shapes.GPU_SLOTS

    def multiply(total):
        for index in range(slots - 1):
            pl.when(index < count)(lambda index=index: fetch(index, index))

        def step(index, _):
            slot = jax.lax.rem(index, jnp.int32(slots))
            plgpu.barrier_wait(barrier.at[slot])
            plgpu.wgmma(total, *factors(slot))
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # the slot before this one has been read by all
            ahead = index + slots - 1
            pl.when(ahead < count)(lambda: fetch(ahead, jax.lax.rem(ahead, jnp.int32(slots))))
            return _

        jax.lax.fori_loop(0, count, step, None)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((_TILE, _WIDE), jnp.float32))


def _send(v: Array, through, target) -> None:
    """Writes a block to main memory by way of shared memory."""
    through[...] = v.astype(through.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(through, target)
    plgpu.wait_smem_to_gmem(0)


def _times(x: Array, w: tuple, tiles: _Tiles, *, turned: bool) -> Array:
    """Each tile times its group's matrix, or its transpose; leftover tiles are not written."""
    inner, outer = w[0].shape[::-1] if turned else w[0].shape

    def grouped_matmul_times(x, group, matrices, out, rows, block, through, barrier):
        tile, part = jax.lax.axis_index("tile"), jax.lax.axis_index("part")
        here, columns = pl.ds(tile * _TILE, _TILE), pl.ds(part * _WIDE, _WIDE)
        own = group[tile]

        def fetch(index, slot):
            along = pl.ds(index * _TILE, _TILE)
            plgpu.copy_gmem_to_smem(x.at[here, along], rows.at[slot], barrier.at[slot])
            for e, matrix in enumerate(matrices):

                @pl.when(own == e)
                def _(matrix=matrix):
                    source = matrix.at[columns, along] if turned else matrix.at[along, columns]
                    plgpu.copy_gmem_to_smem(source, block.at[slot], barrier.at[slot])

        def factors(slot):
            right = block.at[slot]
            return rows.at[slot], transposed(right) if turned else right

        @pl.when(own < len(matrices))
        def _():
            y = _ring(inner // _TILE, fetch, factors, barrier)
            _send(y, through, out.at[here, columns])

    slots = shapes.GPU_SLOTS
    return plgpu.kernel(
        grouped_matmul_times,
        out_type=jax.ShapeDtypeStruct((x.shape[0], outer), x.dtype),
        grid=(x.shape[0] // _TILE, outer // _WIDE),
        grid_names=("tile", "part"),
        scratch_types=(
            _room(_TILE, _TILE, slots),
            _room(_WIDE, _TILE, slots) if turned else _room(_TILE, _WIDE, slots),
            _room(_TILE, _WIDE),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ),
        compiler_params=_PARAMETERS,
    )(x, tiles.group, w)


def _outer(x: Array, dy: Array, tiles: _Tiles, groups: int) -> tuple:
    """Each group's sum over its rows of x_t dy_t^T, summed in float32; 0 without rows."""
    inner, outer = x.shape[1], dy.shape[1]

    def grouped_matmul_outer(x, dy, first, count, out, left, right, through, barrier):
        group = jax.lax.axis_index("group")
        rows = pl.ds(jax.lax.axis_index("row") * _TILE, _TILE)
        columns = pl.ds(jax.lax.axis_index("part") * _WIDE, _WIDE)
        begin = first[group]

        def fetch(index, slot):
            here = pl.ds((begin + index) * _TILE, _TILE)
            plgpu.copy_gmem_to_smem(x.at[here, rows], left.at[slot], barrier.at[slot])
            plgpu.copy_gmem_to_smem(dy.at[here, columns], right.at[slot], barrier.at[slot])

        def factors(slot):
            return transposed(left.at[slot]), right.at[slot]

        found = _ring(count[group], fetch, factors, barrier)
        for e, matrix in enumerate(out):

            @pl.when(group == e)
            def _(matrix=matrix):
                _send(found, through, matrix.at[rows, columns])

    slots = shapes.GPU_SLOTS
    found = plgpu.kernel(
        grouped_matmul_outer,
        out_type=(tuple(jax.ShapeDtypeStruct((inner, outer), x.dtype) for _ in range(groups)),),
        grid=(groups, inner // _TILE, outer // _WIDE),
        grid_names=("group", "row", "part"),
        scratch_types=(
            _room(_TILE, _TILE, slots),
            _room(_TILE, _WIDE, slots),
            _room(_TILE, _WIDE),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ),
        compiler_params=_PARAMETERS,
    )(x, dy, tiles.first, tiles.count)
    return tuple(found[0])
