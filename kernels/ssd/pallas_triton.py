"""SSD as Pallas kernels by way of Triton, for NVIDIA GPUs older than Hopper and float32.

JAX has deprecated this lowering: nothing else depends on this file. A program takes one chunk and a
block of heads of one group, which share C B^T; see `chunks.py` for the parts.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

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

_PARAMETERS = pltriton.CompilerParams(num_warps=8, num_stages=1)
_LEAST = 16  # the smallest side of a matrix that Triton multiplies


def supports(x, dt, A, B, C, *, chunk=None, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if (reason := refuse_platform("gpu")) is not None:
        return reason
    channels, states = x.shape[3], B.shape[3]
    if channels * states > shapes.TRITON_STATE_VALUES:
        most = shapes.TRITON_STATE_VALUES
        return f"a head's state is {channels} x {states}; the kernel holds at most {most} values"
    if chunk is not None and chunk < x.shape[1] and chunk not in (16, 32, 64):
        return f"chunk is {chunk}; the kernel takes 16, 32 or 64"
    return None


def run(x, dt, A, B, C, *, D, state, reset, chunk=None):
    """Runs the kernels. Reverse-mode differentiable once. Arguments and results as in `reference`.

    Memory beside inputs and results: the states at the borders of chunks twice, and in the backward
    pass four times, and 2 B T M floats for each block of heads.
    """
    length, _, channels = x.shape[1:]
    states = B.shape[3]
    chunk = min(shapes.CHUNK["gpu"] if chunk is None else chunk, _power(length))

    def fill(v, **sizes):
        """Appends zeros to the last axes: Triton's arrays have powers of two as sizes."""
        widths = [(0, 0)] * (v.ndim - len(sizes)) + [(0, _power(n) - n) for n in sizes.values()]
        return jnp.pad(v, widths) if any(after for _, after in widths) else v

    kernels = Kernels(chunk, _borders, _outputs, _gradients)
    y, final = chunks.run(
        kernels, fill(x, P=channels), dt, A, fill(B, M=states), fill(C, M=states),
        D=D, state=fill(state, P=channels, M=states), reset=reset,
    )  # fmt: skip
    return y[..., :channels], final[:, :, :channels, :states]


def _power(size: int) -> int:
    return max(1 << (size - 1).bit_length(), _LEAST)


def _call(kernel, grid, inputs, in_specs, out, out_specs, name):
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=_PARAMETERS,
        name=name,
    )(*inputs)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _dot(a: Array, b: Array) -> Array:
    """The matrix product. Products of bfloat16 are exact; float32 keeps all its digits."""
    if a.dtype == b.dtype == jnp.bfloat16:
        return jax.lax.dot(a, b, preferred_element_type=jnp.float32)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jax.lax.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _borders(added: Array, gain: Array, state: Array, *, reverse: bool) -> tuple[Array, Array]:
    batch, count, heads, channels, states = added.shape

    def kernel(added, gain, state, found, last):
        def one(i, h):
            z = count - 1 - i if reverse else i
            found[z, :, :] = h
            # A gain of 0 forgets whatever came before, NaN included.
            return jnp.where(gain[z] > 0.0, gain[z] * h, 0.0) + added[z, :, :]

        last[...] = jax.lax.fori_loop(0, count, one, state[...])

    over_chunks = pl.BlockSpec((None, count, None, channels, states), lambda b, n: (b, 0, n, 0, 0))
    one_state = pl.BlockSpec((None, None, channels, states), lambda b, n: (b, n, 0, 0))
    factors = pl.BlockSpec((None, None, count), lambda b, n: (b, n, 0))
    return _call(
        kernel, (batch, heads), (added, gain, state), (over_chunks, factors, one_state),
        (_float32(*added.shape), _float32(*state.shape)), (over_chunks, one_state), "ssd_borders",
    )  # fmt: skip


def _grid(inputs: Inputs, starts: Array) -> tuple[tuple[int, int, int], int]:
    """(row, block of heads, chunk), and the heads of a block."""
    batch, count, heads = starts.shape[:3]
    per_block = heads_per_block(heads // inputs.B.shape[2], shapes.GPU_HEADS)
    return (batch, heads // per_block, count), per_block


def _specs(inputs: Inputs, starts: Array) -> dict[str, pl.BlockSpec]:
    """Blocks of a grid point."""
    (_, blocks, count), per_block = _grid(inputs, starts)
    _, length, _, channels = inputs.x.shape
    states, chunk = inputs.B.shape[3], length // count
    per_group = blocks // inputs.B.shape[2]
    return {
        "x": pl.BlockSpec((None, chunk, per_block, channels), lambda b, n, z: (b, z, n, 0)),
        "rows": pl.BlockSpec((None, per_block, TO_END + 1, chunk), lambda b, n, z: (b, n, 0, z)),
        "drows": pl.BlockSpec((None, per_block, GRAD_D + 1, chunk), lambda b, n, z: (b, n, 0, z)),
        "group": pl.BlockSpec(
            (None, chunk, None, states), lambda b, n, z: (b, z, n // per_group, 0)
        ),
        "states": pl.BlockSpec(
            (None, None, per_block, channels, states), lambda b, n, z: (b, z, n, 0, 0)
        ),
        "sums": pl.BlockSpec((None, None, chunk, states), lambda b, n, z: (b, n, z, 0)),
        "D": pl.BlockSpec((per_block,), lambda b, n, z: (n,)),
    }


def _decay_between(rows, n) -> Float[Array, "C C"]:
    """Row t, column s: the decay from step s to t, 0 for s > t and across a reset."""

    def difference(index):
        row = rows[n, index, :]
        return row[:, None] - row[None, :]

    chunk = rows.shape[2]
    t = jax.lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    s = jax.lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    visible = (s <= t) & (difference(DOCUMENT) == 0.0)
    return jnp.exp(jnp.where(visible, difference(EXACT) + difference(REST), -jnp.inf))


def _outputs(inputs: Inputs, rows: Array, starts: Array) -> Array:
    grid, per_block = _grid(inputs, starts)

    def kernel(x, rows, B, C, starts, D, y):
        C_ = C[...]
        scores = _dot(C_, B[...].T)

        def one_head(n, _):
            x_n = x[:, n, :]
            weights = scores * _decay_between(rows, n) * rows[n, DT, :][None, :]
            out = _dot(weights, x_n)
            out = out + _dot(C_, starts[n, :, :].T) * rows[n, FROM_START, :][:, None]
            if D is not None:
                out = out + D[n] * x_n.astype(jnp.float32)
            y[:, n, :] = out.astype(y.dtype)
            return _

        jax.lax.fori_loop(0, per_block, one_head, None)

    specs = _specs(inputs, starts)
    in_specs = [specs[k] for k in ("x", "rows", "group", "group", "states")]
    in_specs.append(None if inputs.D is None else specs["D"])
    given = (inputs.x, rows, inputs.B, inputs.C, starts, inputs.D)
    out = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
    return _call(kernel, grid, given, in_specs, out, specs["x"], "ssd_outputs")


def _gradients(inputs: Inputs, rows: Array, starts: Array, ends: Array, dy: Array) -> Gradients:
    grid, per_block = _grid(inputs, starts)
    batch, length, heads, _ = inputs.x.shape
    states, blocks = inputs.B.shape[3], grid[1]

    def kernel(x, rows, B, C, starts, ends, dy, D, dx, drows, dB, dC):
        B_, C_ = B[...], C[...]
        chunk = B_.shape[0]
        scores = _dot(C_, B_.T)
        first = jax.lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
        second = jax.lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)

        def one_head(n, carry):
            dscores, dB_, dC_ = carry
            x_n, dy_n, h, dh = x[:, n, :], dy[:, n, :], starts[n, :, :], ends[n, :, :]
            x32, dy32 = x_n.astype(jnp.float32), dy_n.astype(jnp.float32)
            dt, start, end = (rows[n, i, :] for i in (DT, FROM_START, TO_END))
            decay = _decay_between(rows, n)
            dweights = _dot(dy_n, x_n.T) * dt[None, :] * decay
            from_end = _dot(B_, dh.T)
            du = _dot((scores * decay).T, dy_n) + from_end * end[:, None]
            dx_n = du * dt[:, None]
            if D is not None:
                dx_n = dx_n + D[n] * dy32
                drows[n, GRAD_D, :] = jnp.sum(dy32 * x32, axis=1)
            dx[:, n, :] = dx_n.astype(dx.dtype)
            # [s, r]: the sum over t >= r of the cotangents of the pairs' logs.
            not_before = (first >= second).astype(jnp.float32)
            crossing = _dot((dweights * scores).T, not_before)
            drows[n, GRAD_DT, :] = jnp.sum(du * x32, axis=1)
            drows[n, GRAD_PAIRS, :] = jnp.sum(jnp.where(first < second, crossing, 0.0), axis=0)
            drows[n, GRAD_START, :] = start * jnp.sum(dy32 * _dot(C_, h.T), axis=1)
            drows[n, GRAD_END, :] = end * dt * jnp.sum(x32 * from_end, axis=1)
            dC_ = dC_ + _dot(dy32 * start[:, None], h)
            dB_ = dB_ + _dot(x32 * (dt * end)[:, None], dh)
            return dscores + dweights, dB_, dC_

        zeros = jnp.zeros((chunk, states), jnp.float32)
        start = (jnp.zeros((chunk, chunk), jnp.float32), zeros, zeros)
        dscores, dB_, dC_ = jax.lax.fori_loop(0, per_block, one_head, start)
        dC[...] = dC_ + _dot(dscores, B_)
        dB[...] = dB_ + _dot(dscores.T, C_)

    specs = _specs(inputs, starts)
    in_specs = [specs[k] for k in ("x", "rows", "group", "group", "states", "states", "x")]
    in_specs.append(None if inputs.D is None else specs["D"])
    sums = _float32(batch, blocks, length, states)
    out = (
        jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
        _float32(batch, heads, GRAD_D + 1, length),
        sums,
        sums,
    )
    out_specs = tuple(specs[k] for k in ("x", "drows", "sums", "sums"))
    given = (inputs.x, rows, inputs.B, inputs.C, starts, ends, dy, inputs.D)
    return Gradients(*_call(kernel, grid, given, in_specs, out, out_specs, "ssd_gradients"))
