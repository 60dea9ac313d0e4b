"""SSD as Pallas kernels for TPUs (Mosaic): the matrix form chunk by chunk, forward and backward.

The grid is (row, block of heads of one group, chunk), chunks innermost: the states [P, M] of a
block's heads wait in scratch memory for the next chunk. Time lies on the lanes of x and y ([P, T]
for each head), so that a chunk fills them whatever P is; the heads of a block share C B^T. What is
one number per step (dt and the decays of `decays.py`) is computed beforehand, as rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..dispatch import refuse_platform
from . import shapes
from .decays import LOWEST_LOG, decays, log_cotangent
from .xla import skip

_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))

# The rows of a head: dt and then the fields of `Decays`, in order.
_DT, _EXACT, _REST, _DOCUMENT, _FROM_START, _TO_END = range(6)
# The rows that the backward pass returns: the cotangents of dt as a factor of x, and of the logs.
_GRAD_DT, _GRAD_PAIRS, _GRAD_START, _GRAD_END = range(4)


class _Sizes(NamedTuple):
    """Steps per chunk, and heads per block."""

    chunk: int
    heads: int


class _Inputs(NamedTuple):
    """What is differentiated; T is a whole number of chunks."""

    x: Array  # B N P T
    dt: Array  # B N T, float32
    logs: Array  # B N T, float32, at least LOWEST_LOG
    B: Array  # B G T M
    C: Array  # B G T M
    state: Array  # B N P M, float32


def supports(x, dt, A, B, C, *, chunk=None, **_) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if (reason := refuse_platform("tpu")) is not None:
        return reason
    length, channels, states = x.shape[1], x.shape[3], B.shape[3]
    if channels * states > shapes.TPU_STATE_VALUES:
        most = shapes.TPU_STATE_VALUES
        return f"a head's state is {channels} x {states}; the kernel holds at most {most} values"
    if chunk is not None and chunk < length and (chunk % shapes.TPU_LANES or chunk > 256):
        return f"chunk is {chunk}; the kernel takes {shapes.TPU_LANES} or 256"
    return None


def run(x, dt, A, B, C, *, D, state, reset, chunk=None):
    """Runs the kernels. Reverse-mode differentiable once. Arguments and results as in `reference`.

    Memory beside inputs and results: x and y turned, and in the backward pass the states at the
    borders of chunks and 2 B T M floats for each block of heads.
    """
    length, heads, channels = x.shape[1:]
    groups, states = B.shape[2:]
    sizes = _sizes(length, heads // groups, channels, states, chunk)
    rest = -length % sizes.chunk

    def turn(v, *order):
        """Appends steps that leave the state as it is, and reorders the axes."""
        widths = [(0, rest if axis == 1 else 0) for axis in range(v.ndim)]
        return jnp.transpose(jnp.pad(v, widths) if rest else v, order)

    A32, dt32 = A.astype(jnp.float32), dt.astype(jnp.float32)
    inputs = _Inputs(
        x=turn(x, 0, 2, 3, 1),
        dt=turn(dt32, 0, 2, 1),
        logs=turn(jnp.maximum(dt32 * A32, LOWEST_LOG), 0, 2, 1),
        B=turn(B, 0, 2, 1, 3),
        C=turn(C, 0, 2, 1, 3),
        state=state,
    )
    y, final = _scan(sizes, inputs, None if reset is None else turn(reset, 0, 1))
    y = jnp.transpose(y[..., :length], (0, 3, 1, 2))
    return skip(y, x.astype(jnp.float32), D).astype(x.dtype), final


def _sizes(length: int, heads: int, channels: int, states: int, chunk: int | None) -> _Sizes:
    """One chunk if the sequence is short; as many heads of a group as fit."""
    chunk = shapes.CHUNK["tpu"] if chunk is None else chunk
    if length < chunk:
        chunk = -(-length // shapes.TPU_SHORTEST) * shapes.TPU_SHORTEST
    fit = shapes.TPU_STATE_VALUES // (channels * max(states, chunk))
    return _Sizes(chunk, max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(fit, 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(sizes: _Sizes, inputs: _Inputs, reset: Array | None) -> tuple[Array, Array]:
    """Returns y [B N P T], float32, and the final state."""
    y, final, _ = _forward(sizes, inputs, _rows(sizes, inputs, reset), keep_borders=False)
    return y, final


def _scan_forward(sizes, inputs, reset):
    rows = _rows(sizes, inputs, reset)
    y, final, borders = _forward(sizes, inputs, rows, keep_borders=True)
    return (y, final), (inputs, reset, borders)


def _scan_backward(sizes, residuals, cotangents):
    inputs, reset, borders = residuals
    dy, dfinal = cotangents
    rows = _rows(sizes, inputs, reset)
    dx, drows, dB, dC, dstate = _backward(sizes, inputs, rows, borders, dy, dfinal)
    batch, heads, length = inputs.dt.shape

    def over_chunks(row):
        return drows[:, :, row].reshape(batch, heads, -1, sizes.chunk)

    dlogs = log_cotangent(*map(over_chunks, (_GRAD_PAIRS, _GRAD_START, _GRAD_END)))

    def over_heads(v, like):
        """Sums over the blocks of heads of each group."""
        return jnp.sum(v.reshape(batch, like.shape[1], -1, *v.shape[2:]), axis=2).astype(like.dtype)

    return (
        _Inputs(
            x=dx,
            dt=drows[:, :, _GRAD_DT],
            logs=dlogs.reshape(batch, heads, length),
            B=over_heads(dB, inputs.B),
            C=over_heads(dC, inputs.C),
            state=dstate,
        ),
        None,
    )


_scan.defvjp(_scan_forward, _scan_backward)


def _rows(sizes: _Sizes, inputs: _Inputs, reset: Array | None) -> Float[Array, "B N 6 T"]:
    """The numbers of each step."""
    batch, heads, length = inputs.dt.shape
    if reset is not None:
        reset = reset.reshape(batch, -1, sizes.chunk)
    found = decays(inputs.logs.reshape(batch, heads, -1, sizes.chunk), reset)
    rows = [inputs.dt, *(v.reshape(batch, heads, length) for v in found)]
    return jnp.stack(rows, axis=2)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Contracts one axis of each. Products of bfloat16 are exact; float32 keeps all its digits."""
    exact = a.dtype == b.dtype == jnp.bfloat16
    return jax.lax.dot_general(
        a if exact else a.astype(jnp.float32),
        b if exact else b.astype(jnp.float32),
        (((a_axis,), (b_axis,)), ((), ())),
        precision=None if exact else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _decay_between(row: Float[Array, "6 C"]) -> Float[Array, "C C"]:
    """Row t, column s: the decay from step s to t, 0 for s > t and across a reset."""
    chunk = row.shape[1]
    t = jax.lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    s = jax.lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)

    def column(index):
        """A row turned: its diagonal, summed over the lanes."""
        return jnp.sum(jnp.where(t == s, row[index][None, :], 0.0), axis=1, keepdims=True)

    def difference(index):
        return column(index) - row[index][None, :]

    log = difference(_EXACT) + difference(_REST)
    visible = (s <= t) & (difference(_DOCUMENT) == 0.0)
    return jnp.exp(jnp.where(visible, log, -jnp.inf))


def _specs(sizes: _Sizes, inputs: _Inputs, chunk_of) -> dict[str, pl.BlockSpec]:
    """Blocks of a grid point (row, block of heads, i-th chunk to be visited)."""
    channels, states = inputs.state.shape[2:]
    blocks_per_group = inputs.x.shape[1] // inputs.B.shape[1] // sizes.heads

    def by_head(*shape, last):
        """[B N . .]; `last` tells whether time is its last axis."""
        return pl.BlockSpec(
            (None, sizes.heads, *shape), lambda b, n, i: (b, n, 0, chunk_of(i) if last else 0)
        )

    return {
        "x": by_head(channels, sizes.chunk, last=True),
        "rows": by_head(_TO_END + 1, sizes.chunk, last=True),
        "drows": by_head(_GRAD_END + 1, sizes.chunk, last=True),
        "state": by_head(channels, states, last=False),
        "group": pl.BlockSpec(
            (None, None, sizes.chunk, states),
            lambda b, n, i: (b, n // blocks_per_group, chunk_of(i), 0),
        ),
        "per_block": pl.BlockSpec(
            (None, None, sizes.chunk, states), lambda b, n, i: (b, n, chunk_of(i), 0)
        ),
        "border": pl.BlockSpec(
            (None, None, sizes.heads, channels, states), lambda b, n, i: (b, chunk_of(i), n, 0, 0)
        ),
    }


def _forward(sizes: _Sizes, inputs: _Inputs, rows: Array, *, keep_borders: bool):
    batch, heads, channels, length = inputs.x.shape
    states, chunks = inputs.B.shape[3], length // sizes.chunk
    specs = _specs(sizes, inputs, lambda i: i)
    out = {
        "y": jax.ShapeDtypeStruct(inputs.x.shape, jnp.float32),
        "final": jax.ShapeDtypeStruct(inputs.state.shape, jnp.float32),
    }
    out_specs = {"y": specs["x"], "final": specs["state"]}
    if keep_borders:
        shape = (batch, chunks, heads, channels, states)
        out["borders"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        out_specs["borders"] = specs["border"]
    found = pl.pallas_call(
        _forward_kernel,
        out_shape=out,
        grid=(batch, heads // sizes.heads, chunks),
        in_specs=[specs[k] for k in ("x", "rows", "group", "group", "state")],
        out_specs=out_specs,
        scratch_shapes=(pltpu.VMEM((sizes.heads, channels, states), jnp.float32),),
        compiler_params=_PARAMETERS,
        name="ssd_forward",
    )(inputs.x, rows, inputs.B, inputs.C, inputs.state)
    return found["y"], found["final"], found.get("borders")


def _forward_kernel(x, rows, B, C, state, out, carried):
    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = state[...]

    if "borders" in out:
        out["borders"][...] = carried[...]
    B, C = B[...], C[...]
    scores = _dot(C, B, 1, 1)

    def one_head(n, _):
        row, h = rows[n], carried[n]
        start, end = row[_FROM_START][None, :], row[_TO_END][None, :]
        u = row[_DT][None, :] * x[n].astype(jnp.float32)
        y = _dot(u, scores * _decay_between(row), 1, 1)
        out["y"][n] = y + _dot(h, C, 1, 1) * start
        carried[n] = start[:, -1:] * h + _dot(u * end, B, 1, 0)
        return _

    jax.lax.fori_loop(0, x.shape[0], one_head, None)
    out["final"][...] = carried[...]


def _backward(sizes: _Sizes, inputs: _Inputs, rows: Array, borders: Array, dy, dfinal):
    batch, heads, channels, length = inputs.x.shape
    states, chunks = inputs.B.shape[3], length // sizes.chunk
    blocks = heads // sizes.heads
    specs = _specs(sizes, inputs, lambda i: chunks - 1 - i)
    per_block = jax.ShapeDtypeStruct((batch, blocks, length, states), jnp.float32)
    return pl.pallas_call(
        _backward_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
            jax.ShapeDtypeStruct((batch, heads, _GRAD_END + 1, length), jnp.float32),
            per_block,
            per_block,
            jax.ShapeDtypeStruct(inputs.state.shape, jnp.float32),
        ),
        grid=(batch, blocks, chunks),
        in_specs=[specs[k] for k in ("x", "rows", "group", "group", "border", "x", "state")],
        out_specs=tuple(specs[k] for k in ("x", "drows", "per_block", "per_block", "state")),
        scratch_shapes=(pltpu.VMEM((sizes.heads, channels, states), jnp.float32),),
        compiler_params=_PARAMETERS,
        name="ssd_backward",
    )(inputs.x, rows, inputs.B, inputs.C, borders, dy, dfinal)


def _backward_kernel(x, rows, B, C, border, dy, dfinal, dx, drows, dB, dC, dstate, carried):
    """With W = scores o decay, y = u W^T + from_start o (h C^T), h' = u o to_end B + decay h."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = dfinal[...]

    B, C = B[...], C[...]
    scores = _dot(C, B, 1, 1)
    chunk = scores.shape[0]
    first = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    second = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    not_before = (first >= second).astype(jnp.float32)
    last = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1) == chunk - 1
    dB[...] = jnp.zeros_like(dB)
    dC[...] = jnp.zeros_like(dC)

    def one_head(n, dscores):
        row, h, dh, dy_n = rows[n], border[n], carried[n], dy[n]
        dt, start, end = (row[i][None, :] for i in (_DT, _FROM_START, _TO_END))
        x32 = x[n].astype(jnp.float32)
        u, decay = dt * x32, _decay_between(row)
        dweights = _dot(dy_n, u, 0, 0)
        dweights_decayed = dweights * decay
        from_end = _dot(dh, B, 1, 1)
        du = _dot(dy_n, scores * decay, 1, 0) + from_end * end
        dx[n] = (du * dt).astype(dx.dtype)
        # [s, r]: the sum over t >= r of the cotangents of the pairs' logs.
        crossing = _dot(dweights_decayed * scores, not_before, 0, 0)
        total = jnp.sum(dh * h) * start
        grads = {
            _GRAD_DT: jnp.sum(du * x32, axis=0, keepdims=True),
            _GRAD_PAIRS: jnp.sum(jnp.where(first < second, crossing, 0.0), axis=0, keepdims=True),
            _GRAD_START: start * jnp.sum(dy_n * _dot(h, C, 1, 1), axis=0, keepdims=True)
            + jnp.where(last, total, 0.0),
            _GRAD_END: end * jnp.sum(u * from_end, axis=0, keepdims=True),
        }
        for index, value in grads.items():
            drows[n, pl.ds(index, 1), :] = value
        dC[...] += _dot(dy_n * start, h, 0, 0)
        dB[...] += _dot(u * end, dh, 0, 0)
        carried[n] = start[:, -1:] * dh + _dot(dy_n * start, C, 1, 0)
        return dscores + dweights_decayed

    dscores = jax.lax.fori_loop(0, x.shape[0], one_head, jnp.zeros_like(scores))
    dC[...] += _dot(dscores, B, 1, 0)
    dB[...] += _dot(dscores, C, 0, 0)
    dstate[...] = carried[...]
