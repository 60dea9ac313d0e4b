"""The SSD layer of Mamba-2: checks, masking and the choice of an implementation."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..compat import target_platform
from ..dispatch import Implementation, KernelArgumentError, check_array, choose, valid_mask
from . import pallas_mosaic_gpu, pallas_tpu, pallas_triton, reference, tree, xla
from .shapes import FEW_STEPS

_OP = "ssd"

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(reference.run),
    "xla_sequential": Implementation(xla.run_sequential),
    "xla_chunked": Implementation(xla.run_chunked),
    "pallas_tpu": Implementation(pallas_tpu.run, pallas_tpu.supports),
    "pallas_mosaic_gpu": Implementation(pallas_mosaic_gpu.run, pallas_mosaic_gpu.supports),
    "pallas_triton": Implementation(pallas_triton.run, pallas_triton.supports),
}


def ssd(
    x: Float[Array, "B T N P"],
    dt: Float[Array, "B T N"],
    A: Float[Array, " N"],
    B: Float[Array, "B T G M"],
    C: Float[Array, "B T G M"],
    *,
    D: Float[Array, " N"] | None = None,
    state: Float[Array, "B N P M"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    chunk: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P M"]]:
    """Runs Mamba-2's SSD layer over T steps (arXiv 2405.21060).

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  y_t = h_t C_t + D x_t, with a scalar A per head.

    The arithmetic is float32 whatever the inputs' dtype. T is free: 1 is a decode step (no loop);
    calls chained through `state` equal one call.

    Args:
        x: inputs per head.
        dt: step sizes per head, already positive (softplus is the caller's).
        A: the decay per head, negative reals.
        B: input projections per group; N must be a multiple of G.
        C: output projections per group.
        D: skip weight per head; None means no skip.
        state: the state before the first step, float32; None means zeros.
        reset: True where a document begins: the state is zeroed before that step.
        lengths: valid steps per row, which come first; later steps leave the state as it is, give
            y = 0, and their inputs are never read (they may be NaN).
        chunk: steps per chunk of the chunked forms; None means the default of the device.
        implementation: see `kernels.dispatch`.

    Returns:
        y in x.dtype and the final state, float32.

    Raises:
        KernelArgumentError: a shape, dtype, chunk or implementation is wrong.
    """
    _check(x, dt, A, B, C, D, state)
    batch, length, heads, channels = x.shape
    if chunk is not None and chunk < 1:
        raise KernelArgumentError(f"{_OP}: chunk is {chunk}; want at least 1")
    if reset is not None:
        check_array(_OP, "reset", reset, (batch, length), "bool")
    valid = None
    if lengths is not None:
        check_array(_OP, "lengths", lengths, (batch,), "integer")
        valid = valid_mask(lengths, length)
        # A step with dt = 0 and x = 0 is the identity on the state. `where` also keeps NaN in
        # padding out of the gradients.
        x, B, C = (jnp.where(valid[:, :, None, None], v, 0) for v in (x, B, C))
        dt = jnp.where(valid[:, :, None], dt, 0)
        reset = None if reset is None else reset & valid
    if state is None:
        state = jnp.zeros((batch, heads, channels, B.shape[3]), jnp.float32)
    if length == 0:
        return jnp.zeros_like(x), state
    if reset is not None:  # whatever a slot held before its first document is never read
        state = jnp.where(reset[:, 0, None, None, None], 0.0, state)
    arguments = dict(D=D, state=state, reset=reset, chunk=chunk)
    inputs = (x, dt, A, B, C)
    name = choose(_OP, IMPLEMENTATIONS, _preferred(length), implementation, *inputs, **arguments)
    y, final = IMPLEMENTATIONS[name].run(*inputs, **arguments)
    return (y if valid is None else jnp.where(valid[:, :, None, None], y, 0)), final


def ssd_tree(
    x: Float[Array, "B T N P"],
    dt: Float[Array, "B T N"],
    A: Float[Array, " N"],
    B: Float[Array, "B T G M"],
    C: Float[Array, "B T G M"],
    parents: Int[Array, "B T"],
    *,
    D: Float[Array, " N"] | None = None,
    state: Float[Array, "B N P M"] | None = None,
) -> Float[Array, "B T N P"]:
    """Runs SSD over a tree of nodes, each taking its state from its parent.

    y of a node equals the last y of a plain run along the path from the root to it. No state is
    returned: after verification the accepted path is run again by `ssd`.

    Args:
        x: inputs of the nodes; dt, B, C likewise.
        dt: step sizes.
        A: the decay per head.
        B: input projections.
        C: output projections.
        parents: index of each node's parent, smaller than its own (topological order); -1 is the
            carried state. Values are data, so they are not checked.
        D: skip weight per head.
        state: the carried state, float32; None means zeros.

    Returns:
        y in x.dtype.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    _check(x, dt, A, B, C, D, state)
    batch, nodes, heads, channels = x.shape
    check_array(_OP, "parents", parents, (batch, nodes), "integer")
    if state is None:
        state = jnp.zeros((batch, heads, channels, B.shape[3]), jnp.float32)
    return tree.run_tree(x, dt, A, B, C, parents, D=D, state=state)


def _preferred(length: int) -> tuple[str, ...]:
    """Names for this device and length, fastest first."""
    if length <= FEW_STEPS:
        return ("xla_sequential",)
    kernels = {
        "cpu": (),
        "gpu": ("pallas_mosaic_gpu", "pallas_triton"),
        "tpu": ("pallas_tpu",),
    }
    return (*kernels[target_platform()], "xla_chunked")


def _check(x, dt, A, B, C, D, state) -> None:
    check_array(_OP, "x", x, "B T N P")
    check_array(_OP, "B", B, "B T G M")
    batch, length, heads, channels = x.shape
    groups, states = B.shape[2:]
    check_array(_OP, "dt", dt, (batch, length, heads))
    check_array(_OP, "A", A, (heads,))
    check_array(_OP, "B", B, (batch, length, groups, states))
    check_array(_OP, "C", C, (batch, length, groups, states))
    if groups == 0 or heads % groups:
        raise KernelArgumentError(f"{_OP}: {heads} heads are not a multiple of {groups} groups")
    if D is not None:
        check_array(_OP, "D", D, (heads,))
    if state is not None:
        check_array(_OP, "state", state, (batch, heads, channels, states), "float32")
