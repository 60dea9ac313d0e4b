"""The selective scan as Pallas kernels for TPUs (Mosaic), forward and backward.

The grid is (row, block of channels, chunk of steps), chunks innermost: the state [M, channels]
waits in scratch memory for the next chunk, so that main memory sees x, dt, B, C, z and y once and
of the states only those at the borders of chunks, which the backward kernel starts from. Channels
lie on the lanes and state dimensions on the sublanes. B and C are turned to [M, T] beforehand; a
step picks its column by a mask and a sum over lanes, for a traced number cannot index a lane.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..dispatch import refuse_platform
from . import shapes

_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


class _Inputs(NamedTuple):
    """What the kernels read: E and T whole blocks, B and C turned, all but x, dt, z float32."""

    x: Array  # B T E
    dt: Array  # B T E
    z: Array | None  # B T E
    At: Array  # M E
    Bt: Array  # B M T
    Ct: Array  # B M T
    D: Array | None  # 1 E
    keep: Array | None  # B 1 T; 0 where a document begins
    state: Array  # B M E


class _Gradients(NamedTuple):
    """What the backward kernel writes; sums over rows or over blocks of channels are still open."""

    x: Array  # B T E
    dt: Array  # B T E
    z: Array | None  # B T E
    At: Array  # B M E
    Bt: Array  # B blocks M T
    Ct: Array  # B blocks M T
    D: Array | None  # B 1 E
    state: Array  # B M E


class _Sizes(NamedTuple):
    """Steps per chunk and channels per block."""

    chunk: int
    block: int


def supports(x, dt, A, B, C, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if (reason := refuse_platform("tpu")) is not None:
        return reason
    if A.shape[1] > shapes.TPU_MAX_STATES:
        return f"M is {A.shape[1]}; the kernel holds at most {shapes.TPU_MAX_STATES}"
    return None


def run(x, dt, A, B, C, *, D, z, state, reset):
    """Runs the kernels. Reverse-mode differentiable once. Arguments and results as in `reference`.

    Memory beside inputs and results: the states at borders, B T M E / chunk floats, and in the
    backward pass 2 B T M E / block floats.
    """
    length, inner = x.shape[1:]
    sizes = _sizes(length, inner, A.shape[1])
    more_steps, more_channels = -length % sizes.chunk, -inner % sizes.block

    def pad(v, steps=None, channels=None):
        """Appends zeros along the axes named; a step of zeros leaves the state as it is."""
        if v is None:
            return None
        more = {steps: more_steps, channels: more_channels}
        widths = [(0, more.get(axis, 0)) for axis in range(v.ndim)]
        return jnp.pad(v, widths) if any(after for _, after in widths) else v

    keep = None
    if reset is not None:
        keep = 1.0 - pad(reset, 1).astype(jnp.float32)[:, None, :]
    inputs = _Inputs(
        x=pad(x, 1, 2),
        dt=pad(dt, 1, 2),
        z=pad(z, 1, 2),
        At=pad(A.astype(jnp.float32).T, channels=1),
        Bt=pad(jnp.swapaxes(B.astype(jnp.float32), 1, 2), steps=2),
        Ct=pad(jnp.swapaxes(C.astype(jnp.float32), 1, 2), steps=2),
        D=None if D is None else pad(D.astype(jnp.float32)[None], channels=1),
        keep=keep,
        state=pad(jnp.swapaxes(state, 1, 2), channels=2),
    )
    y, final = _scan(sizes, inputs)
    return y[:, :length, :inner], jnp.swapaxes(final[:, :, :inner], 1, 2)


def _sizes(length: int, inner: int, states: int) -> _Sizes:
    """Blocks as wide as registers can hold the states of; one chunk for a short sequence."""
    lanes = shapes.TPU_LANES
    chunk = shapes.TPU_CHUNK
    if length < chunk:
        chunk = -(-length // shapes.TPU_SHORTEST) * shapes.TPU_SHORTEST
    widest = max(shapes.TPU_STATE_VALUES // states // lanes, 1) * lanes
    return _Sizes(chunk, min(widest, -(-inner // lanes) * lanes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(sizes: _Sizes, inputs: _Inputs) -> tuple[Array, Array]:
    """Returns y [B T E] and the final state [B M E]."""
    y, final, _ = _forward(sizes, inputs, keep_borders=False)
    return y, final


def _scan_forward(sizes, inputs):
    y, final, borders = _forward(sizes, inputs, keep_borders=True)
    return (y, final), (inputs, borders)


def _scan_backward(sizes, residuals, cotangents):
    inputs, borders = residuals
    dy, dfinal = cotangents
    grads = _backward(sizes, inputs, borders, dy, dfinal)
    over_rows = None if grads.D is None else jnp.sum(grads.D, axis=0)
    no_keep = None if inputs.keep is None else jnp.zeros_like(inputs.keep)
    return (
        _Inputs(
            x=grads.x,
            dt=grads.dt,
            z=grads.z,
            At=jnp.sum(grads.At, axis=0),
            Bt=jnp.sum(grads.Bt, axis=1),
            Ct=jnp.sum(grads.Ct, axis=1),
            D=over_rows,
            keep=no_keep,
            state=grads.state,
        ),
    )


_scan.defvjp(_scan_forward, _scan_backward)


def _specs(sizes: _Sizes, inputs: _Inputs, chunk_of) -> _Inputs:
    """The blocks of a grid point (row, block of channels, i-th chunk to be visited)."""
    states = inputs.At.shape[0]
    steps = pl.BlockSpec((None, sizes.chunk, sizes.block), lambda b, e, i: (b, chunk_of(i), e))
    columns = pl.BlockSpec((None, states, sizes.chunk), lambda b, e, i: (b, 0, chunk_of(i)))
    flags = pl.BlockSpec((None, 1, sizes.chunk), lambda b, e, i: (b, 0, chunk_of(i)))
    return _Inputs(
        x=steps,
        dt=steps,
        z=None if inputs.z is None else steps,
        At=pl.BlockSpec((states, sizes.block), lambda b, e, i: (0, e)),
        Bt=columns,
        Ct=columns,
        D=None if inputs.D is None else pl.BlockSpec((1, sizes.block), lambda b, e, i: (0, e)),
        keep=None if inputs.keep is None else flags,
        state=_state_spec(sizes, states),
    )


def _state_spec(sizes: _Sizes, states: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, states, sizes.block), lambda b, e, i: (b, 0, e))


def _border_spec(sizes: _Sizes, states: int, chunk_of) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, states, sizes.block), lambda b, e, i: (b, chunk_of(i), 0, e))


def _column(values: Float[Array, "M C"], t: Array) -> Float[Array, "M 1"]:
    """Column t of a chunk."""
    lane = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.sum(jnp.where(lane == t, values, 0.0), axis=1, keepdims=True)


def _enter(h: Array, keep: Any, t: Array) -> Array:
    """The state as step t finds it (or the cotangent as it leaves): zero where reset."""
    return h if keep is None else jnp.where(_column(keep[...], t) > 0.0, h, 0.0)


def _forward(sizes: _Sizes, inputs: _Inputs, *, keep_borders: bool):
    batch, length, inner = inputs.x.shape
    states = inputs.At.shape[0]
    chunks = length // sizes.chunk
    out = {
        "y": jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
        "final": jax.ShapeDtypeStruct(inputs.state.shape, jnp.float32),
    }
    out_specs = {"y": None, "final": _state_spec(sizes, states)}
    specs = _specs(sizes, inputs, lambda i: i)
    out_specs["y"] = specs.x
    if keep_borders:
        out["borders"] = jax.ShapeDtypeStruct((batch, chunks, states, inner), jnp.float32)
        out_specs["borders"] = _border_spec(sizes, states, lambda i: i)
    steps = pltpu.VMEM((sizes.chunk, sizes.block), jnp.float32)
    found = pl.pallas_call(
        _forward_kernel,
        out_shape=out,
        grid=(batch, inner // sizes.block, chunks),
        in_specs=(specs,),
        out_specs=out_specs,
        scratch_shapes=(pltpu.VMEM((states, sizes.block), jnp.float32), steps, steps, steps),
        compiler_params=_PARAMETERS,
        name="selective_scan_forward",
    )(inputs)
    return found["y"], found["final"], found.get("borders")


def _forward_kernel(inputs, out, state, dt32, u32, y32):
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = inputs.state[...]

    if "borders" in out:
        out["borders"][...] = state[...]
    x = inputs.x[...].astype(jnp.float32)
    dt32[...] = inputs.dt[...].astype(jnp.float32)
    u32[...] = dt32[...] * x
    At, Bt, Ct = inputs.At[...], inputs.Bt[...], inputs.Ct[...]

    def step(t, h):
        row = pl.ds(t, 1)
        h = jnp.exp(dt32[row, :] * At) * _enter(h, inputs.keep, t) + u32[row, :] * _column(Bt, t)
        y32[row, :] = jnp.sum(h * _column(Ct, t), axis=0, keepdims=True)
        return h

    state[...] = jax.lax.fori_loop(0, x.shape[0], step, state[...])
    y = y32[...]
    if inputs.D is not None:
        y = y + inputs.D[...] * x
    if inputs.z is not None:
        y = y * jax.nn.silu(inputs.z[...].astype(jnp.float32))
    out["y"][...] = y.astype(out["y"].dtype)
    out["final"][...] = state[...]


def _backward(sizes: _Sizes, inputs: _Inputs, borders: Array, dy: Array, dfinal: Array):
    batch, length, inner = inputs.x.shape
    states = inputs.At.shape[0]
    chunks, blocks = length // sizes.chunk, inner // sizes.block

    def chunk_of(i):
        return chunks - 1 - i

    def like(v, *shape):
        return None if v is None else jax.ShapeDtypeStruct(shape or v.shape, v.dtype)

    specs = _specs(sizes, inputs, chunk_of)
    columns = pl.BlockSpec(
        (None, None, states, sizes.chunk), lambda b, e, i: (b, e, 0, chunk_of(i))
    )
    state_spec = _state_spec(sizes, states)
    out = _Gradients(
        x=like(inputs.x),
        dt=like(inputs.dt),
        z=like(inputs.z),
        At=like(inputs.At, batch, states, inner),
        Bt=like(inputs.Bt, batch, blocks, states, length),
        Ct=like(inputs.Ct, batch, blocks, states, length),
        D=like(inputs.D, batch, 1, inner),
        state=like(inputs.state),
    )
    out_specs = _Gradients(
        x=specs.x,
        dt=specs.dt,
        z=specs.z,
        At=state_spec,
        Bt=columns,
        Ct=columns,
        D=None
        if inputs.D is None
        else pl.BlockSpec((None, 1, sizes.block), lambda b, e, i: (b, 0, e)),
        state=state_spec,
    )
    steps = pltpu.VMEM((sizes.chunk, sizes.block), jnp.float32)
    (found,) = pl.pallas_call(
        _backward_kernel,
        out_shape=(out,),
        grid=(batch, blocks, chunks),
        in_specs=(specs, _border_spec(sizes, states, chunk_of), specs.x, state_spec),
        out_specs=(out_specs,),
        scratch_shapes=(
            pltpu.VMEM((states, sizes.block), jnp.float32),
            pltpu.VMEM((sizes.chunk, states, sizes.block), jnp.float32),
            *[steps] * 5,
        ),
        compiler_params=_PARAMETERS,
        name="selective_scan_backward",
    )(inputs, borders, dy, dfinal)
    return found


def _backward_kernel(
    inputs, border, dout, dfinal, out, carried, before, dt32, u32, dy32, y32, du32
):
    """One chunk: the states again from its border, then the adjoint sweep of `xla.py`."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = dfinal[...]
        out.At[...] = jnp.zeros_like(out.At)
        if out.D is not None:
            out.D[...] = jnp.zeros_like(out.D)

    x = inputs.x[...].astype(jnp.float32)
    dt32[...] = inputs.dt[...].astype(jnp.float32)
    u32[...] = dt32[...] * x
    At, Bt, Ct = inputs.At[...], inputs.Bt[...], inputs.Ct[...]
    length = x.shape[0]

    def again(t, h):
        row = pl.ds(t, 1)
        before[t] = h
        h = jnp.exp(dt32[row, :] * At) * _enter(h, inputs.keep, t) + u32[row, :] * _column(Bt, t)
        if inputs.z is not None:
            y32[row, :] = jnp.sum(h * _column(Ct, t), axis=0, keepdims=True)
        return h

    last = jax.lax.fori_loop(0, length, again, border[...])
    dy = dout[...].astype(jnp.float32)
    if inputs.z is not None:
        z = inputs.z[...].astype(jnp.float32)
        gate = jax.nn.sigmoid(z)
        y = y32[...] if inputs.D is None else y32[...] + inputs.D[...] * x
        out.z[...] = (dy * y * gate * (1.0 + z * (1.0 - gate))).astype(out.z.dtype)
        dy = dy * z * gate
    dy32[...] = dy
    lane = jax.lax.broadcasted_iota(jnp.int32, Bt.shape, 1)

    def sweep(i, carry):
        t = length - 1 - i
        row = pl.ds(t, 1)
        dh, dA, dB, dC, after = carry
        dt, u, dy, h = dt32[row, :], u32[row, :], dy32[row, :], before[t]
        g = dh + _column(Ct, t) * dy
        ga = g * jnp.exp(dt * At)
        q = ga * _enter(h, inputs.keep, t)
        du32[row, :] = jnp.sum(g * _column(Bt, t), axis=0, keepdims=True)
        y32[row, :] = jnp.sum(q * At, axis=0, keepdims=True)  # y is used up: d(dt) but for du x
        here = lane == t
        dB = jnp.where(here, jnp.sum(g * u, axis=1, keepdims=True), dB)
        dC = jnp.where(here, jnp.sum(after * dy, axis=1, keepdims=True), dC)
        return _enter(ga, inputs.keep, t), dA + q * dt, dB, dC, h

    zeros = jnp.zeros(Bt.shape, jnp.float32)
    start = (carried[...], out.At[...], zeros, zeros, last)
    dh, dA, dB, dC, _ = jax.lax.fori_loop(0, length, sweep, start)
    carried[...] = dh
    out.At[...], out.Bt[...], out.Ct[...], out.state[...] = dA, dB, dC, dh
    dx = du32[...] * dt32[...]
    if inputs.D is not None:
        dx = dx + dy32[...] * inputs.D[...]
        out.D[...] += jnp.sum(dy32[...] * x, axis=0, keepdims=True)
    out.x[...] = dx.astype(out.x.dtype)
    out.dt[...] = (y32[...] + du32[...] * x).astype(out.dt.dtype)
