"""The selective scan as Pallas kernels for Hopper and newer GPUs (Mosaic GPU).

A warpgroup takes 128 channels, one a thread, whose M state values stay in registers. So that few
rows fill the chip too, the steps are cut into segments that run at the same time, in three kernels:
what each segment adds to a state of zeros, the states at the borders of segments, and the outputs.
The backward pass does the same with the adjoint. Within a segment it keeps the states of every few
steps in shared memory; main memory never holds states but at the borders.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..compat import load_with_layout
from ..dispatch import refuse_platform
from . import shapes
from .padding import Padded, PaddedGradients, pad, unpad

LANES = 128  # channels of a block, one for each thread of a warpgroup
TOGETHER = 4  # steps whose inputs are read at once, and whose states the backward pass holds
_TILE = 64  # products that are summed over the channels at once: the rows of a tile of WGMMA

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def supports(x, dt, A, B, C, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if (reason := refuse_platform("gpu", 9.0)) is not None:
        return reason
    if A.shape[1] > shapes.GPU_MAX_STATES:
        return f"M is {A.shape[1]}; the kernel holds at most {shapes.GPU_MAX_STATES}"
    return None


def run(x, dt, A, B, C, *, D, z, state, reset):
    """Runs the kernels. Reverse-mode differentiable once. Arguments and results as in `reference`.

    Memory beside inputs and results: 2 B T M E / segment floats, and in the backward pass twice
    that and 2 B T M E / 128 floats.
    """
    inputs = pad(
        x, dt, A, B, C, D=D, z=z, state=state, reset=reset,
        steps=shapes.GPU_SEGMENT, channels=LANES, states=_TILE // TOGETHER,
    )  # fmt: skip
    return unpad(*_scan(inputs), x, A.shape[1])


@jax.custom_vjp
def _scan(inputs: Padded) -> tuple[Array, Array]:
    """Returns y [B T E] and the final state [B M E]."""
    return _scan_forward(inputs)[0]


def _scan_forward(inputs):
    added, spent = _ends(inputs, None)
    starts, final = _borders(inputs.At, added, spent, inputs.state, reverse=False)
    return (_outputs(inputs, starts), final), (inputs, starts, spent)


def _scan_backward(residuals, cotangents):
    inputs, starts, spent = residuals
    dy, dfinal = cotangents
    added, _ = _ends(inputs, dy)
    ends, dstate = _borders(inputs.At, added, spent, dfinal, reverse=True)
    return (_gradients(inputs, starts, ends, dy)._replace(state=dstate).summed(inputs),)


_scan.defvjp(_scan_forward, _scan_backward)


def _call(kernel, inputs, out, grid, scratch=()):
    """Runs a kernel on one tree of inputs; the grid is (row, block of channels, segment)."""
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=grid,
        grid_names=("row", "block", "segment")[: len(grid)],
        scratch_types=scratch,
        compiler_params=_PARAMETERS,
    )(inputs)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _where():
    """The row and the channels of this block."""
    return jax.lax.axis_index("row"), pl.ds(jax.lax.axis_index("block") * LANES, LANES)


def _zeros() -> Float[Array, " 128"]:
    """A zero for every channel, laid out as what is read from memory."""
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), layout)


def _segments(inputs: Padded) -> int:
    return inputs.x.shape[1] // shapes.GPU_SEGMENT


def _grid(inputs: Padded) -> tuple[int, int, int]:
    return inputs.x.shape[0], inputs.x.shape[2] // LANES, _segments(inputs)


def _sum(terms) -> Array:
    return functools.reduce(jnp.add, terms)


def _sigmoid(v: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-v))


def _enter(h: list, keep, row, t) -> list:
    """The state as step t finds it (or the cotangent as it leaves): zero where reset."""
    if keep is None:
        return h
    inside = keep[row, t] > 0.0
    return [jnp.where(inside, v, 0.0) for v in h]


def _read(ref, row, steps, channels) -> list:
    """What several steps read, before any of it is used."""
    return [ref[row, t, channels].astype(jnp.float32) for t in steps]


def _scalars(ref, row, t, states: int) -> list:
    return [ref[row, t, m] for m in range(states)]


def _next(h: list, A: list, dt: Array, u: Array, B: list) -> list:
    """h_t from the state that step t finds."""
    return [jnp.exp(dt * a) * v + u * b for v, a, b in zip(h, A, B, strict=True)]


def _steps(segment, group) -> list:
    first = segment * shapes.GPU_SEGMENT + group * TOGETHER
    return [first + k for k in range(TOGETHER)]


def _ends(inputs: Padded, dy: Array | None) -> tuple[Array, Array]:
    """What each segment adds to a state of zeros, and the sum of its dt (infinite across a reset).

    With dy, what it adds to a cotangent of zeros at its end: C dy of each step, decayed from it.

    Returns:
        [B S M E] and [B S E].
    """
    batch, _, inner = inputs.x.shape
    states, groups = inputs.At.shape[0], shapes.GPU_SEGMENT // TOGETHER

    def selective_scan_ends(given, added, spent):
        inputs, dy = given
        row, channels = _where()
        segment = jax.lax.axis_index("segment")
        A = [inputs.At[m, channels] for m in range(states)]

        def several(group, carry):
            *h, total = carry
            steps = _steps(segment, group if dy is None else groups - 1 - group)
            dts = _read(inputs.dt, row, steps, channels)
            values = _read(inputs.x if dy is None else dy, row, steps, channels)
            if dy is not None and inputs.z is not None:
                z = _read(inputs.z, row, steps, channels)
                values = [v * g * _sigmoid(g) for v, g in zip(values, z, strict=True)]
            order = range(TOGETHER) if dy is None else range(TOGETHER)[::-1]
            for k in order:
                t, dt, value = steps[k], dts[k], values[k]
                if dy is None:
                    B = _scalars(inputs.B, row, t, states)
                    h = _next(_enter(h, inputs.keep, row, t), A, dt, dt * value, B)
                else:
                    C = _scalars(inputs.C, row, t, states)
                    h = [jnp.exp(dt * a) * (v + value * c) for v, a, c in zip(h, A, C, strict=True)]
                    h = _enter(h, inputs.keep, row, t)
                total = total + dt
                if inputs.keep is not None:
                    total = jnp.where(inputs.keep[row, t] > 0.0, total, jnp.inf)
            return (*h, total)

        *h, total = jax.lax.fori_loop(0, groups, several, (_zeros(),) * (states + 1))
        for m in range(states):
            added[row, segment, m, channels] = h[m]
        spent[row, segment, channels] = total

    segments = _segments(inputs)
    out = (_float32(batch, segments, states, inner), _float32(batch, segments, inner))
    return _call(selective_scan_ends, (inputs, dy), out, _grid(inputs))


def _borders(At: Array, added: Array, spent: Array, state: Array, *, reverse: bool):
    """The states that the segments find, [B S M E], and the one behind the last.

    In reverse the cotangents that reach the segments' ends, and the one before the first.
    """
    batch, segments, states, inner = added.shape

    def selective_scan_borders(given, found, last):
        At, added, spent, state = given
        row, channels = _where()
        A = [At[m, channels] for m in range(states)]

        def one(i, h):
            segment = segments - 1 - i if reverse else i
            total = spent[row, segment, channels]
            gone = total == jnp.inf
            after = []
            for m in range(states):
                found[row, segment, m, channels] = h[m]
                decayed = jnp.where(gone, 0.0, jnp.exp(total * A[m]) * h[m])
                after.append(decayed + added[row, segment, m, channels])
            return tuple(after)

        start = tuple(state[row, m, channels] for m in range(states))
        for m, value in enumerate(jax.lax.fori_loop(0, segments, one, start)):
            last[row, m, channels] = value

    out = (_float32(*added.shape), _float32(*state.shape))
    given = (At, added, spent, state)
    return _call(selective_scan_borders, given, out, (batch, inner // LANES))


def _outputs(inputs: Padded, starts: Array) -> Array:
    """Runs every step from the states that the segments find."""
    states = inputs.At.shape[0]

    def selective_scan_outputs(given, y):
        inputs, starts = given
        row, channels = _where()
        segment = jax.lax.axis_index("segment")
        A = [inputs.At[m, channels] for m in range(states)]
        D = None if inputs.D is None else inputs.D[channels]

        def several(group, h):
            steps = _steps(segment, group)
            dts, xs = (_read(v, row, steps, channels) for v in (inputs.dt, inputs.x))
            zs = None if inputs.z is None else _read(inputs.z, row, steps, channels)
            h = list(h)
            for k, t in enumerate(steps):
                B, C = (_scalars(v, row, t, states) for v in (inputs.B, inputs.C))
                h = _next(_enter(h, inputs.keep, row, t), A, dts[k], dts[k] * xs[k], B)
                out = _sum(v * c for v, c in zip(h, C, strict=True))
                if D is not None:
                    out = out + D * xs[k]
                if zs is not None:
                    out = out * zs[k] * _sigmoid(zs[k])
                y[row, t, channels] = out.astype(y.dtype)
            return tuple(h)

        start = tuple(starts[row, segment, m, channels] for m in range(states))
        jax.lax.fori_loop(0, shapes.GPU_SEGMENT // TOGETHER, several, start)

    out = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
    return _call(selective_scan_outputs, (inputs, starts), out, _grid(inputs))


def _gradients(inputs: Padded, starts: Array, ends: Array, dy: Array) -> PaddedGradients:
    """All cotangents but the state's, from states and cotangents at the borders of segments."""
    batch, length, inner = inputs.x.shape
    states, segments = inputs.At.shape[0], _segments(inputs)
    groups, products = shapes.GPU_SEGMENT // TOGETHER, TOGETHER * states

    def selective_scan_gradients(given, out, borders, terms):
        inputs, starts, ends, dy = given
        row, channels = _where()
        segment = jax.lax.axis_index("segment")
        A = [inputs.At[m, channels] for m in range(states)]
        D = None if inputs.D is None else inputs.D[channels]

        def again(group, h):
            """The states of every group of steps into shared memory."""
            steps = _steps(segment, group)
            dts, xs = (_read(v, row, steps, channels) for v in (inputs.dt, inputs.x))
            h = list(h)
            for m in range(states):
                borders[group, m, :] = h[m]
            for k, t in enumerate(steps):
                B = _scalars(inputs.B, row, t, states)
                h = _next(_enter(h, inputs.keep, row, t), A, dts[k], dts[k] * xs[k], B)
            return tuple(h)

        def sum_over_channels(into, group):
            """The sums of `terms` over the channels, a tile of rows at a time."""
            plgpu.commit_smem()  # every thread's terms are there
            for first in range(0, products, _TILE):
                rows = pl.ds(first, _TILE)
                tile = load_with_layout(terms.at[rows], plgpu.Layout.WGMMA)
                at = (jax.lax.axis_index("block"), row, segment * groups + group, rows)
                into[at] = jnp.sum(tile, axis=1)
            plgpu.commit_smem()  # and read, before the next ones are written

        def sweep(i, carry):
            group = groups - 1 - i
            dh, dA, dD = list(carry[:states]), list(carry[states : 2 * states]), carry[2 * states]
            steps = _steps(segment, group)
            dts, xs = (_read(v, row, steps, channels) for v in (inputs.dt, inputs.x))
            dys = _read(dy, row, steps, channels)
            zs = None if inputs.z is None else _read(inputs.z, row, steps, channels)
            h = [borders[group, m, :] for m in range(states)]
            found, left = [], []  # the states before and after each step
            for k, t in enumerate(steps):
                B = _scalars(inputs.B, row, t, states)
                found.append(_enter(h, inputs.keep, row, t))
                h = _next(found[k], A, dts[k], dts[k] * xs[k], B)
                left.append(h)
                if zs is None:
                    continue
                C, gate = _scalars(inputs.C, row, t, states), _sigmoid(zs[k])
                y = _sum(v * c for v, c in zip(h, C, strict=True))
                y = y if D is None else y + D * xs[k]
                dz = dys[k] * y * gate * (1.0 + zs[k] * (1.0 - gate))
                out.z[row, t, channels] = dz.astype(out.z.dtype)
                dys[k] = dys[k] * zs[k] * gate
            for k in range(TOGETHER)[::-1]:
                t, dt, x = steps[k], dts[k], xs[k]
                B, C = (_scalars(v, row, t, states) for v in (inputs.B, inputs.C))
                g = [v + dys[k] * c for v, c in zip(dh, C, strict=True)]
                dh = [v * jnp.exp(dt * a) for v, a in zip(g, A, strict=True)]
                q = [v * w for v, w in zip(dh, found[k], strict=True)]
                dh = _enter(dh, inputs.keep, row, t)
                dA = [v + w * dt for v, w in zip(dA, q, strict=True)]
                du = _sum(v * b for v, b in zip(g, B, strict=True))
                ddt = _sum(v * a for v, a in zip(q, A, strict=True)) + du * x
                dx = du * dt
                if D is not None:
                    dx, dD = dx + D * dys[k], dD + dys[k] * x
                out.x[row, t, channels] = dx.astype(out.x.dtype)
                out.dt[row, t, channels] = ddt.astype(out.dt.dtype)
                for m in range(states):
                    terms[k * states + m, :] = g[m] * (dt * x)
            sum_over_channels(out.B, group)
            for k in range(TOGETHER):
                for m in range(states):
                    terms[k * states + m, :] = left[k][m] * dys[k]
            sum_over_channels(out.C, group)
            return (*dh, *dA, dD)

        h = tuple(starts[row, segment, m, channels] for m in range(states))
        jax.lax.fori_loop(0, groups, again, h)
        dh = tuple(ends[row, segment, m, channels] for m in range(states))
        carry = jax.lax.fori_loop(0, groups, sweep, (*dh, *(_zeros(),) * (states + 1)))
        for m in range(states):
            out.At[row * segments + segment, m, channels] = carry[states + m]
        if D is not None:
            out.D[row * segments + segment, channels] = carry[2 * states]

    def like(v):
        return None if v is None else jax.ShapeDtypeStruct(v.shape, v.dtype)

    sums = _float32(inner // LANES, batch, length // TOGETHER, products)
    out = PaddedGradients(
        x=like(inputs.x),
        dt=like(inputs.dt),
        z=like(inputs.z),
        At=_float32(batch * segments, states, inner),
        B=sums,
        C=sums,
        D=None if inputs.D is None else _float32(batch * segments, inner),
        state=None,
    )
    scratch = (
        plgpu.SMEM((groups, states, LANES), jnp.float32),
        plgpu.SMEM((products, LANES), jnp.float32),
    )
    given = (inputs, starts, ends, dy)
    (found,) = _call(selective_scan_gradients, given, (out,), _grid(inputs), scratch)
    whole = (inner // LANES, batch, length, states)
    return found._replace(B=found.B.reshape(whole), C=found.C.reshape(whole))
