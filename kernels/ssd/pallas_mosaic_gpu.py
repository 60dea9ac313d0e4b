"""SSD as Pallas kernels for Hopper and newer GPUs (Mosaic GPU); see `chunks.py` for the parts.

A warpgroup takes one chunk of 64 steps and a block of heads of one group. Tensor cores multiply
bfloat16 and sum in float32. x, B, C and the cotangent of y are bfloat16; what is float32 (decayed
scores, states) goes in as three bfloat16 numbers that add up to it, so that no digit is lost: each
product has such a factor on one side at most. All factors are in shared memory, where a factor may
also be read with its axes swapped.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..compat import load_with_layout, transposed
from ..dispatch import refuse_platform
from . import chunks, shapes
from .chunks import (
    DOCUMENT,
    DT,
    EXACT,
    FROM_START,
    GRAD_D,
    GRAD_DT,
    GRAD_END,
    GRAD_PAIRS,
    GRAD_START,
    REST,
    TO_END,
    Gradients,
    Inputs,
    Kernels,
    heads_per_block,
)

CHUNK = 64  # the rows of a tile of WGMMA
_PARTS = 3  # bfloat16 numbers that add up to a float32 one
_VALUES = 1024  # of a state, for each block of `borders`

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_PAIRS = plgpu.Layout.WGMMA
_BY_ROW, _BY_COLUMN = _PAIRS.reduce(1), _PAIRS.reduce(0)


def supports(x, dt, A, B, C, *, chunk=None, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if (reason := refuse_platform("gpu", 9.0)) is not None:
        return reason
    for name, v in (("x", x), ("B", B), ("C", C)):
        if v.dtype != jnp.bfloat16:
            return f"{name} has dtype {v.dtype}; the kernel takes bfloat16"
    channels, states = x.shape[3], B.shape[3]
    if channels % 64 or states % 64 or channels * states > shapes.GPU_STATE_VALUES:
        most = shapes.GPU_STATE_VALUES
        return (
            f"P is {channels} and M is {states}; the kernel takes multiples of 64 with at most "
            f"{most} values in a state"
        )
    if chunk is not None and chunk != CHUNK:
        return f"chunk is {chunk}; the kernel takes {CHUNK}"
    return None


def run(x, dt, A, B, C, *, D, state, reset, chunk=None):
    """Runs the kernels. Reverse-mode differentiable once. Arguments and results as in `reference`.

    `chunk` is `CHUNK` or None. Memory beside inputs and results: the states at the borders of
    chunks twice, in the backward pass four times, and 2 B T M floats for each block of heads.
    """
    del chunk
    kernels = Kernels(CHUNK, _borders, _outputs, _gradients)
    return chunks.run(kernels, x, dt, A, B, C, D=D, state=state, reset=reset)


def _call(kernel, inputs, out, grid, scratch=()):
    """Runs a kernel on one tree of inputs; the grid is (row, heads, part)."""
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=grid,
        grid_names=("row", "heads", "part"),
        scratch_types=scratch,
        compiler_params=_PARAMETERS,
    )(inputs)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _borders(added: Array, gain: Array, state: Array, *, reverse: bool) -> tuple[Array, Array]:
    batch, count, heads, channels, states = added.shape
    size = channels * states

    def ssd_borders(given, found, last):
        added, gain, state = given
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("heads")
        values = pl.ds(jax.lax.axis_index("part") * _VALUES, _VALUES)

        def one(i, h):
            z = count - 1 - i if reverse else i
            found[row, z, head, values] = h
            factor = gain[row, head, z]
            # A gain of 0 forgets whatever came before, NaN included.
            return jnp.where(factor > 0.0, factor * h, 0.0) + added[row, z, head, values]

        last[row, head, values] = jax.lax.fori_loop(0, count, one, state[row, head, values])

    flat, flat_state = (batch, count, heads, size), (batch, heads, size)
    given = (added.reshape(flat), gain, state.reshape(flat_state))
    out = (_float32(*flat), _float32(*flat_state))
    found, last = _call(ssd_borders, given, out, (batch, heads, size // _VALUES))
    return found.reshape(added.shape), last.reshape(state.shape)


def _grid(inputs: Inputs) -> tuple[tuple[int, int, int], int]:
    """(row, block of heads, chunk), and the heads of a block."""
    batch, length, heads, _ = inputs.x.shape
    per_block = heads_per_block(heads // inputs.B.shape[2], shapes.GPU_HEADS)
    return (batch, heads // per_block, length // CHUNK), per_block


def _smem(rows: int, columns: int, *more: int) -> plgpu.SMEM:
    """Room for a matrix of bfloat16 in the order in which tensor cores read it."""
    return plgpu.SMEM((*more, rows, columns), jnp.bfloat16, transforms=_tiles(64))


def _tiles(columns: int) -> tuple:
    """The order of a matrix's values in shared memory; a tile's rows are 128 bytes long."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)


def _product(pairs: list, columns: int) -> Float[Array, "64 S"]:
    """The sum of the products of pairs of matrices in shared memory."""

    def multiply(total):
        for left, right in pairs:
            plgpu.wgmma(total, left, right)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((CHUNK, columns), jnp.float32))


def _store(ref, v: Array) -> list:
    """Stores three bfloat16 matrices that add up to v where nothing is read any more."""
    plgpu.commit_smem()  # what was there has been read by all
    for index in range(_PARTS):
        ref.at[index][...] = v.astype(jnp.bfloat16)
        v = v - v.astype(jnp.bfloat16).astype(jnp.float32)
    plgpu.commit_smem()
    return [ref.at[index] for index in range(_PARTS)]


def _across(v: Float[Array, " R"], shape: tuple[int, int], axis: int) -> Float[Array, "R S"]:
    """One number per row (axis 0) or per column (axis 1), repeated."""
    return jax.lax.broadcast_in_dim(v, shape, (axis,))


class _Steps:
    """The numbers of a head's steps in a chunk, read as rows or as columns of a matrix."""

    def __init__(self, rows, row, head, start):
        self._at = lambda index: rows.at[row, head, index, pl.ds(start, CHUNK)]

    def by_row(self, index: int, columns: int) -> Float[Array, "64 S"]:
        """One number per row, repeated."""
        return _across(load_with_layout(self._at(index), _BY_ROW), (CHUNK, columns), 0)

    def by_column(self, index: int) -> Float[Array, "64 64"]:
        """One number per column, repeated."""
        return _across(load_with_layout(self._at(index), _BY_COLUMN), (CHUNK, CHUNK), 1)

    def decay(self) -> Float[Array, "64 64"]:
        """Row t, column s: the decay from step s to t, 0 for s > t and across a reset."""

        def difference(index):
            return self.by_row(index, CHUNK) - self.by_column(index)

        t, s = _row_and_column()
        visible = (s <= t) & (difference(DOCUMENT) == 0.0)
        log = jnp.where(visible, difference(EXACT) + difference(REST), 0.0)
        return jnp.where(visible, jnp.exp(log), 0.0)


def _row_and_column() -> tuple[Array, Array]:
    """The indices of each element of a matrix of pairs of steps."""
    shape = (CHUNK, CHUNK)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=_PAIRS) for i in (0, 1))
    return row, column


def _where(inputs: Inputs, per_block: int):
    """The row, the block of heads, its group and the chunk of this block of the grid."""
    row, block, z = (jax.lax.axis_index(name) for name in ("row", "heads", "part"))
    per_group = inputs.x.shape[2] // inputs.B.shape[2] // per_block
    return row, block, jax.lax.div(block, jnp.int32(per_group)), z


def _copy(barrier, *pairs) -> None:
    """Copies matrices into shared memory and waits for them."""
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def _send(v: Array, through, target) -> None:
    """Writes a matrix to main memory by way of shared memory that nothing will read any more."""
    plgpu.commit_smem()  # it has been read by all
    through[...] = v.astype(through.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(through, target)
    plgpu.wait_smem_to_gmem(0)


def _outputs(inputs: Inputs, rows: Array, starts: Array) -> Array:
    grid, per_block = _grid(inputs)
    channels, states = inputs.x.shape[3], inputs.B.shape[3]

    def ssd_outputs(given, y, x, B, C, h, pairs, barrier, of_group):
        inputs, rows, starts = given
        row, block, group, z = _where(inputs, per_block)
        start = z * CHUNK
        steps = pl.ds(start, CHUNK)
        _copy(of_group, (inputs.B.at[row, steps, group], B), (inputs.C.at[row, steps, group], C))
        scores = _product([(C, transposed(B))], CHUNK)

        def one_head(n, _):
            head = block * per_block + n
            _copy(barrier, (inputs.x.at[row, steps, head], x))
            numbers = _Steps(rows, row, head, start)
            parts = _store(h, load_with_layout(starts.at[row, z, head], _PAIRS))
            out = _product([(C, transposed(part)) for part in parts], channels)
            out = out * numbers.by_row(FROM_START, channels)
            parts = _store(pairs, scores * numbers.decay() * numbers.by_column(DT))
            out = out + _product([(part, x) for part in parts], channels)
            if inputs.D is not None:
                out = out + inputs.D[head] * load_with_layout(x, _PAIRS).astype(jnp.float32)
            _send(out, x, y.at[row, steps, head])
            return _

        jax.lax.fori_loop(0, per_block, one_head, None)

    scratch = (
        _smem(CHUNK, channels),
        _smem(CHUNK, states),
        _smem(CHUNK, states),
        _smem(channels, states, _PARTS),
        _smem(CHUNK, CHUNK, _PARTS),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2),
    )
    out = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
    return _call(ssd_outputs, (inputs, rows, starts), out, grid, scratch)


def _gradients(inputs: Inputs, rows: Array, starts: Array, ends: Array, dy: Array) -> Gradients:
    grid, per_block = _grid(inputs)
    batch, length, heads, channels = inputs.x.shape
    states = inputs.B.shape[3]

    def ssd_gradients(given, out, x, g, B, C, h, pairs, not_before, dB, dC, barrier):
        inputs, rows, starts, ends, dy = given
        row, block, group, z = _where(inputs, per_block)
        start = z * CHUNK
        steps = pl.ds(start, CHUNK)
        _copy(barrier, (inputs.B.at[row, steps, group], B), (inputs.C.at[row, steps, group], C))
        scores = _product([(C, transposed(B))], CHUNK)
        first, second = _row_and_column()
        not_before[...] = jnp.where(second >= first, 1.0, 0.0).astype(jnp.bfloat16)
        zeros = plgpu.layout_cast(jnp.zeros((CHUNK, states), jnp.float32), _PAIRS)
        dB[...], dC[...] = zeros, zeros

        def add(total, v):
            total[...] = load_with_layout(total, _PAIRS) + v

        def one_head(n, _):
            head = block * per_block + n
            _copy(barrier, (inputs.x.at[row, steps, head], x), (dy.at[row, steps, head], g))
            numbers = _Steps(rows, row, head, start)
            x32, g32 = (load_with_layout(v, _PAIRS).astype(jnp.float32) for v in (x, g))
            dt, end = (numbers.by_row(index, channels) for index in (DT, TO_END))

            def put(index, v):
                """The sum of each row is a number of its step."""
                out.rows.at[row, head, index, steps][...] = jnp.sum(v, axis=1)

            # By way of the state at the chunk's start.
            parts = _store(h, load_with_layout(starts.at[row, z, head], _PAIRS))
            from_start = _product([(C, transposed(part)) for part in parts], channels)
            put(GRAD_START, g32 * from_start * numbers.by_row(FROM_START, channels))
            from_start = _product([(g, part) for part in parts], states)
            add(dC, from_start * numbers.by_row(FROM_START, states))
            # By way of the state at its end.
            parts = _store(h, load_with_layout(ends.at[row, z, head], _PAIRS))
            from_end = _product([(B, transposed(part)) for part in parts], channels) * end
            put(GRAD_END, x32 * from_end * dt)
            du = _product([(x, part) for part in parts], states)
            add(dB, du * numbers.by_row(DT, states) * numbers.by_row(TO_END, states))
            # From step to step.
            decay = numbers.decay()
            dweights = _product([(g, transposed(x))], CHUNK) * decay * numbers.by_column(DT)
            parts = _store(pairs, dweights)
            add(dC, _product([(part, B) for part in parts], states))
            add(dB, _product([(transposed(part), C) for part in parts], states))
            parts = _store(pairs, dweights * scores)
            # Row r, column s: the sum over t >= r of the cotangents of the pairs' logs.
            crossing = _product([(not_before, part) for part in parts], CHUNK)
            put(GRAD_PAIRS, jnp.where(second < first, crossing, 0.0))
            parts = _store(pairs, scores * decay)
            du = from_end + _product([(transposed(part), g) for part in parts], channels)
            put(GRAD_DT, du * x32)
            dx = du * dt
            if inputs.D is not None:
                dx = dx + inputs.D[head] * g32
            put(GRAD_D, g32 * x32)
            _send(dx, x, out.x.at[row, steps, head])
            return _

        jax.lax.fori_loop(0, per_block, one_head, None)
        out.B.at[row, block, steps][...] = load_with_layout(dB, _PAIRS)
        out.C.at[row, block, steps][...] = load_with_layout(dC, _PAIRS)

    total = plgpu.SMEM((CHUNK, states), jnp.float32, transforms=_tiles(32))
    scratch = (
        _smem(CHUNK, channels),
        _smem(CHUNK, channels),
        _smem(CHUNK, states),
        _smem(CHUNK, states),
        _smem(channels, states, _PARTS),
        _smem(CHUNK, CHUNK, _PARTS),
        _smem(CHUNK, CHUNK),
        total,
        total,
        plgpu.Barrier(num_arrivals=2),
    )
    sums = _float32(batch, grid[1], length, states)
    out = Gradients(
        x=jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
        rows=_float32(batch, heads, GRAD_D + 1, length),
        B=sums,
        C=sums,
    )
    given = (inputs, rows, starts, ends, dy)
    return _call(ssd_gradients, given, (out,), grid, scratch)[0]
