"""SSD in three parallel parts, as GPUs run it; a backend supplies the kernels for two of them.

Forward: what each chunk adds to a state of zeros (a matmul, left to XLA), the states at the borders
of chunks (kernel `borders`), and all outputs from those (kernel `outputs`), chunk by chunk at the
same time. The backward pass does the same with the adjoint (kernel `gradients` in the end).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .decays import LOWEST_LOG, decays, log_cotangent
from .xla import einsum

# The rows of a head, one number for each step: dt and then the fields of `Decays`, in order.
DT, EXACT, REST, DOCUMENT, FROM_START, TO_END = range(6)
# The rows that `gradients` returns: the cotangents of dt as a factor of x, of the logs of the
# decays (between pairs by the step they have in common, from the start, to the end), and of D.
GRAD_DT, GRAD_PAIRS, GRAD_START, GRAD_END, GRAD_D = range(5)


class Inputs(NamedTuple):
    """What is differentiated; T is a whole number of chunks."""

    x: Array  # B T N P
    dt: Array  # B N T, float32
    logs: Array  # B N T, float32, at least LOWEST_LOG
    B: Array  # B T G M
    C: Array  # B T G M
    D: Array | None  # N, float32
    state: Array  # B N P M, float32


class Gradients(NamedTuple):
    """What `gradients` returns. B and C are still to be summed over the blocks of each group."""

    x: Array  # B T N P, in x.dtype
    rows: Array  # B N 5 T, float32
    B: Array  # B blocks T M, float32
    C: Array  # B blocks T M, float32


class Kernels(NamedTuple):
    """The kernels of a backend, and their sizes.

    Attributes:
        chunk: steps per chunk, Z chunks in all.
        borders: (added [B Z N P M], gain [B N Z], state [B N P M], reverse) -> the states that the
            chunks find [B Z N P M] and the one behind the last; in reverse the cotangents.
        outputs: (inputs, rows [B N 6 T], starts [B Z N P M]) -> y [B T N P] in x.dtype.
        gradients: (inputs, rows, starts, ends, dy) -> `Gradients`; `ends` are the cotangents of the
            states behind the chunks.
    """

    chunk: int
    borders: Callable
    outputs: Callable
    gradients: Callable


def run(kernels: Kernels, x, dt, A, B, C, *, D, state, reset):
    """Runs the parts. Reverse-mode differentiable once. Arguments as `reference.run`'s."""
    length = x.shape[1]
    more = -length % kernels.chunk

    def fill(v):
        """Appends steps that leave the state as it is."""
        return jnp.pad(v, ((0, 0), (0, more)) + ((0, 0),) * (v.ndim - 2)) if more else v

    dt32 = fill(dt.astype(jnp.float32))
    inputs = Inputs(
        x=fill(x),
        dt=jnp.swapaxes(dt32, 1, 2),
        logs=jnp.swapaxes(jnp.maximum(dt32 * A.astype(jnp.float32), LOWEST_LOG), 1, 2),
        B=fill(B),
        C=fill(C),
        D=None if D is None else D.astype(jnp.float32),
        state=state,
    )
    y, final = _scan(kernels, inputs, None if reset is None else fill(reset))
    return y[:, :length], final


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(kernels: Kernels, inputs: Inputs, reset: Array | None) -> tuple[Array, Array]:
    """Returns y [B T N P] and the final state."""
    return _scan_forward(kernels, inputs, reset)[0]


def _scan_forward(kernels, inputs, reset):
    rows = _rows(kernels, inputs, reset)
    u = jnp.moveaxis(rows[:, :, DT] * rows[:, :, TO_END], 1, 2)[..., None] * _float32(inputs.x)
    added = _added(kernels, u, inputs.B)
    starts, final = kernels.borders(added, _gain(kernels, rows), inputs.state, reverse=False)
    return (kernels.outputs(inputs, rows, starts), final), (inputs, reset, starts)


def _scan_backward(kernels, residuals, cotangents):
    inputs, reset, starts = residuals
    dy, dfinal = cotangents
    rows = _rows(kernels, inputs, reset)
    gain = _gain(kernels, rows)
    added = _added(kernels, jnp.moveaxis(rows[:, :, FROM_START], 1, 2)[..., None] * _float32(dy),
                   inputs.C)  # fmt: skip
    ends, dstate = kernels.borders(added, gain, dfinal, reverse=True)
    grads = kernels.gradients(inputs, rows, starts, ends, dy)
    batch, heads, length = inputs.dt.shape

    def over_chunks(row):
        return grads.rows[:, :, row].reshape(batch, heads, -1, kernels.chunk)

    # The whole chunk's decay is that from the start to the last step.
    whole = gain * jnp.einsum("bznpm,bznpm->bnz", starts, ends)
    start = over_chunks(GRAD_START).at[..., -1].add(whole)
    dlogs = log_cotangent(over_chunks(GRAD_PAIRS), start, over_chunks(GRAD_END))

    def over_heads(v, like):
        """[B blocks T M] -> [B T G M], summed over the blocks of each group."""
        v = jnp.sum(v.reshape(batch, like.shape[2], -1, *v.shape[2:]), axis=2)
        return jnp.swapaxes(v, 1, 2).astype(like.dtype)

    return (
        Inputs(
            x=grads.x,
            dt=grads.rows[:, :, GRAD_DT],
            logs=dlogs.reshape(batch, heads, length),
            B=over_heads(grads.B, inputs.B),
            C=over_heads(grads.C, inputs.C),
            D=None if inputs.D is None else jnp.sum(grads.rows[:, :, GRAD_D], axis=(0, 2)),
            state=dstate,
        ),
        None,
    )


_scan.defvjp(_scan_forward, _scan_backward)


def heads_per_block(heads: int, most: int) -> int:
    """The largest divisor of a group's heads that is not above `most`."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)


def _float32(v: Array) -> Array:
    return v.astype(jnp.float32)


def _rows(kernels: Kernels, inputs: Inputs, reset: Array | None) -> Float[Array, "B N 6 T"]:
    batch, heads, length = inputs.dt.shape
    if reset is not None:
        reset = reset.reshape(batch, -1, kernels.chunk)
    found = decays(inputs.logs.reshape(batch, heads, -1, kernels.chunk), reset)
    rows = [inputs.dt, *(v.reshape(batch, heads, length) for v in found)]
    return jnp.stack(rows, axis=2)


def _gain(kernels: Kernels, rows: Float[Array, "B N 6 T"]) -> Float[Array, "B N Z"]:
    """The decay over each whole chunk."""
    return rows[:, :, FROM_START, kernels.chunk - 1 :: kernels.chunk]


def _added(
    kernels: Kernels, values: Float[Array, "B T N P"], weights: Float[Array, "B T G M"]
) -> Float[Array, "B Z N P M"]:
    """The sum over each chunk's steps of values x weights."""
    batch, _, heads, channels = values.shape
    groups, states = weights.shape[2:]
    values = values.reshape(batch, -1, kernels.chunk, groups, heads // groups, channels)
    weights = _float32(weights).reshape(batch, -1, kernels.chunk, groups, states)
    added = einsum("bztgrp,bztgm->bzgrpm", values, weights)
    return added.reshape(batch, -1, heads, channels, states)
