"""The selective scan as Pallas kernels by way of Triton, for NVIDIA GPUs older than Hopper.

JAX has deprecated this lowering: nothing else depends on this file. A program takes one row and a
block of channels and walks over all steps; the states [channels, M] stay in registers. Forward
saves them at the borders of segments; backward visits the segments in reverse and keeps the states
of one at a time in a scratch area, which the cache holds.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from ..dispatch import refuse_platform
from . import shapes
from .padding import Padded, PaddedGradients, pad, unpad

LANES = 64  # channels of a block
_PARAMETERS = pltriton.CompilerParams(num_warps=4, num_stages=1)


def supports(x, dt, A, B, C, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if (reason := refuse_platform("gpu")) is not None:
        return reason
    if A.shape[1] > shapes.TRITON_MAX_STATES:
        return f"M is {A.shape[1]}; the kernel holds at most {shapes.TRITON_MAX_STATES}"
    return None


def run(x, dt, A, B, C, *, D, z, state, reset):
    """Runs the kernels. Reverse-mode differentiable once. Arguments and results as in `reference`.

    Memory beside inputs and results, in the backward pass: B T M E / segment floats, 2 B T M E / 64
    and B segment M E.
    """
    power = 1 << (A.shape[1] - 1).bit_length()  # Triton's arrays have powers of two as sizes
    inputs = pad(
        x, dt, A, B, C, D=D, z=z, state=state, reset=reset,
        steps=shapes.GPU_SEGMENT, channels=LANES, states=power,
    )  # fmt: skip
    return unpad(*_scan(inputs), x, A.shape[1])


@jax.custom_vjp
def _scan(inputs: Padded) -> tuple[Array, Array]:
    """Returns y [B T E] and the final state [B M E]."""
    return _forward(inputs, keep_borders=False)[:2]


def _scan_forward(inputs):
    y, final, borders = _forward(inputs, keep_borders=True)
    return (y, final), (inputs, borders)


def _scan_backward(residuals, cotangents):
    inputs, borders = residuals
    return (_backward(inputs, borders, *cotangents).summed(inputs),)


_scan.defvjp(_scan_forward, _scan_backward)


def _turned(inputs: Padded) -> Padded:
    """States with M last, where one thread holds a channel's and the sum over M is cheap."""
    return inputs._replace(At=inputs.At.T, state=jnp.swapaxes(inputs.state, 1, 2))


def _steps_spec(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length, LANES), lambda b, e: (b, 0, e))


def _state_spec(states: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, LANES, states), lambda b, e: (b, e, 0))


def _border_spec(count: int, states: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, count, LANES, states), lambda b, e: (b, 0, e, 0))


def _specs(inputs: Padded) -> Padded:
    """What a program of the grid (row, block of channels) sees."""
    length, states = inputs.B.shape[1:]
    steps = _steps_spec(length)
    rows = pl.BlockSpec((None, length, states), lambda b, e: (b, 0, 0))
    return Padded(
        x=steps,
        dt=steps,
        z=None if inputs.z is None else steps,
        At=pl.BlockSpec((LANES, states), lambda b, e: (e, 0)),
        B=rows,
        C=rows,
        D=None if inputs.D is None else pl.BlockSpec((LANES,), lambda b, e: (e,)),
        keep=None if inputs.keep is None else pl.BlockSpec((None, length), lambda b, e: (b, 0)),
        state=_state_spec(states),
    )


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _sigmoid(v: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-v))


def _enter(h: Array, keep, t) -> Array:
    """The state as step t finds it (or the cotangent as it leaves): zero where reset."""
    return h if keep is None else jnp.where(keep[t] > 0.0, h, 0.0)


def _read(ref, t) -> Array:
    return ref[t, :].astype(jnp.float32)


def _next(h: Array, A: Array, inputs: Padded, t) -> tuple[Array, Array, Array, Array]:
    """Returns h_t, and what step t reads: dt, x and the state that it finds."""
    dt, x = _read(inputs.dt, t), _read(inputs.x, t)
    h = _enter(h, inputs.keep, t)
    after = jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * inputs.B[t, :][None, :]
    return after, dt, x, h


def _before_gate(h: Array, x: Array, inputs: Padded, t) -> Array:
    """C h_t + D x_t."""
    y = jnp.sum(h * inputs.C[t, :][None, :], axis=1)
    return y if inputs.D is None else y + inputs.D[...] * x


def _forward(inputs: Padded, *, keep_borders: bool) -> tuple[Array, Array, Array | None]:
    batch, length, inner = inputs.x.shape
    states, count = inputs.B.shape[2], length // shapes.GPU_SEGMENT

    def kernel(inputs, out):
        A = inputs.At[...]

        def segment(s, h):
            if "borders" in out:
                out["borders"][s, :, :] = h

            def step(k, h):
                t = s * shapes.GPU_SEGMENT + k
                h, _, x, _ = _next(h, A, inputs, t)
                y = _before_gate(h, x, inputs, t)
                if inputs.z is not None:
                    z = _read(inputs.z, t)
                    y = y * z * _sigmoid(z)
                out["y"][t, :] = y.astype(out["y"].dtype)
                return h

            return jax.lax.fori_loop(0, shapes.GPU_SEGMENT, step, h)

        out["final"][...] = jax.lax.fori_loop(0, count, segment, inputs.state[...])

    turned = _turned(inputs)
    out = {
        "y": jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
        "final": _float32(batch, inner, states),
    }
    out_specs = {"y": _steps_spec(length), "final": _state_spec(states)}
    if keep_borders:
        out["borders"] = _float32(batch, count, inner, states)
        out_specs["borders"] = _border_spec(count, states)
    found = _call(kernel, (turned,), (_specs(turned),), out, out_specs, "selective_scan_forward")
    return found["y"], jnp.swapaxes(found["final"], 1, 2), found.get("borders")


def _backward(inputs: Padded, borders: Array, dy: Array, dfinal: Array) -> PaddedGradients:
    batch, length, inner = inputs.x.shape
    states, count, blocks = inputs.B.shape[2], length // shapes.GPU_SEGMENT, inner // LANES

    def kernel(inputs, borders, dy, dfinal, out, scratch):
        A = inputs.At[...]

        def segment(i, carry):
            s = count - 1 - i
            first = s * shapes.GPU_SEGMENT

            def again(k, h):
                scratch[k, :, :] = h
                return _next(h, A, inputs, first + k)[0]

            last = jax.lax.fori_loop(0, shapes.GPU_SEGMENT, again, borders[s, :, :])
            pltriton.debug_barrier()  # what one thread stored, another may load

            def sweep(j, carry):
                k = shapes.GPU_SEGMENT - 1 - j
                t = first + k
                dh, dA, dD, after = carry
                before = scratch[k, :, :]
                dt, x, ds = _read(inputs.dt, t), _read(inputs.x, t), _read(dy, t)
                if inputs.z is not None:
                    z = _read(inputs.z, t)
                    gate, y = _sigmoid(z), _before_gate(after, x, inputs, t)
                    dz = ds * y * gate * (1.0 + z * (1.0 - gate))
                    out.z[t, :] = dz.astype(out.z.dtype)
                    ds = ds * z * gate
                g = dh + inputs.C[t, :][None, :] * ds[:, None]
                ga = g * jnp.exp(dt[:, None] * A)
                q = ga * _enter(before, inputs.keep, t)
                du = jnp.sum(g * inputs.B[t, :][None, :], axis=1)
                dx, ddt = du * dt, jnp.sum(q * A, axis=1) + du * x
                if inputs.D is not None:
                    dx, dD = dx + inputs.D[...] * ds, dD + ds * x
                out.x[t, :] = dx.astype(out.x.dtype)
                out.dt[t, :] = ddt.astype(out.dt.dtype)
                out.B[t, :] = jnp.sum(g * (dt * x)[:, None], axis=0)
                out.C[t, :] = jnp.sum(after * ds[:, None], axis=0)
                return _enter(ga, inputs.keep, t), dA + q * dt[:, None], dD, before

            carry = jax.lax.fori_loop(0, shapes.GPU_SEGMENT, sweep, (*carry, last))
            pltriton.debug_barrier()  # and loaded, before the next segment is stored
            return carry[:3]

        zeros = jnp.zeros((LANES, states), jnp.float32)
        start = (dfinal[...], zeros, jnp.zeros((LANES,), jnp.float32))
        dh, dA, dD = jax.lax.fori_loop(0, count, segment, start)
        out.state[...], out.At[...] = dh, dA
        if inputs.D is not None:
            out.D[...] = dD

    def like(v):
        return None if v is None else jax.ShapeDtypeStruct(v.shape, v.dtype)

    turned = _turned(inputs)
    steps, state_spec = _steps_spec(length), _state_spec(states)
    columns = pl.BlockSpec((None, None, length, states), lambda b, e: (e, b, 0, 0))
    sums, per_row = _float32(blocks, batch, length, states), _float32(batch, inner, states)
    gate, skip = inputs.z is not None, inputs.D is not None
    out = PaddedGradients(
        x=like(inputs.x), dt=like(inputs.dt), z=like(inputs.z), At=per_row, B=sums, C=sums,
        D=_float32(batch, inner) if skip else None, state=per_row,
    )  # fmt: skip
    out_specs = PaddedGradients(
        x=steps, dt=steps, z=steps if gate else None, At=state_spec, B=columns, C=columns,
        D=pl.BlockSpec((None, LANES), lambda b, e: (b, e)) if skip else None, state=state_spec,
    )  # fmt: skip
    scratch = _float32(batch, shapes.GPU_SEGMENT, inner, states)
    found, _ = _call(
        kernel,
        (turned, borders, dy, jnp.swapaxes(dfinal, 1, 2)),
        (_specs(turned), _border_spec(count, states), steps, state_spec),
        (out, scratch),
        (out_specs, _border_spec(shapes.GPU_SEGMENT, states)),
        "selective_scan_backward",
    )
    turn = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    return found._replace(At=turn(found.At), state=turn(found.state))


def _call(kernel, inputs, in_specs, out, out_specs, name):
    rows, inner = inputs[0].x.shape[0], inputs[0].x.shape[2]
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(rows, inner // LANES),
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=_PARAMETERS,
        name=name,
    )(*inputs)
