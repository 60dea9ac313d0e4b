"""The selective scan of Mamba (S6): checks, masking and the choice of an implementation."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..compat import target_platform
from ..dispatch import Implementation, check_array, choose, valid_mask
from . import pallas_mosaic_gpu, pallas_tpu, pallas_triton, reference, tree, xla

_OP = "selective_scan"

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(reference.run),
    "xla_sequential": Implementation(xla.run_sequential),
    "xla_associative": Implementation(xla.run_associative, xla.supports_associative),
    "xla_chunked": Implementation(xla.run_chunked),
    "pallas_tpu": Implementation(pallas_tpu.run, pallas_tpu.supports),
    "pallas_mosaic_gpu": Implementation(pallas_mosaic_gpu.run, pallas_mosaic_gpu.supports),
    "pallas_triton": Implementation(pallas_triton.run, pallas_triton.supports),
}


def selective_scan(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "E M"],
    B: Float[Array, "B T M"],
    C: Float[Array, "B T M"],
    *,
    D: Float[Array, " E"] | None = None,
    z: Float[Array, "B T E"] | None = None,
    state: Float[Array, "B E M"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B E M"]]:
    """Runs Mamba's selective scan over T steps (arXiv 2312.00752, equations 1a, 1b, 2a).

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,  y_t = (C_t h_t + D x_t) silu(z_t).

    The recurrence runs in float32 whatever the inputs' dtype. T is free: 1 is a decode step (no
    loop), a few is a chunk of a prompt; calls chained through `state` equal one call.

    Args:
        x: inputs.
        dt: step sizes, already positive (softplus is the caller's).
        A: the state matrix's diagonal, negative reals.
        B: input projections.
        C: output projections.
        D: skip weights; None means no skip.
        z: gate; None means no gate.
        state: the state before the first step, float32; None means zeros.
        reset: True where a document begins: the state is zeroed before that step.
        lengths: valid steps per row, which come first; later steps leave the state as it is, give
            y = 0, and their inputs are never read (they may be NaN).
        implementation: see `kernels.dispatch`.

    Returns:
        y in x.dtype and the final state, float32.

    Raises:
        KernelArgumentError: a shape, dtype or implementation is wrong.
    """
    _check(x, dt, A, B, C, D, z, state)
    batch, length, inner = x.shape
    if reset is not None:
        check_array(_OP, "reset", reset, (batch, length), "bool")
    valid = None
    if lengths is not None:
        check_array(_OP, "lengths", lengths, (batch,), "integer")
        valid = valid_mask(lengths, length)
        # A step with dt = 0 and x = 0 is the identity on the state. `where` also keeps NaN in
        # padding out of the gradients.
        x, dt, B, C = (jnp.where(valid[:, :, None], v, 0) for v in (x, dt, B, C))
        z = None if z is None else jnp.where(valid[:, :, None], z, 0)
        reset = None if reset is None else reset & valid
    if state is None:
        state = jnp.zeros((batch, inner, A.shape[1]), jnp.float32)
    if length == 0:
        return jnp.zeros_like(x), state
    if reset is not None:  # whatever a slot held before its first document is never read
        state = jnp.where(reset[:, 0, None, None], 0.0, state)
    arguments = dict(D=D, z=z, state=state, reset=reset)
    inputs = (x, dt, A, B, C)
    name = choose(_OP, IMPLEMENTATIONS, _preferred(length), implementation, *inputs, **arguments)
    y, final = IMPLEMENTATIONS[name].run(*inputs, **arguments)
    return (y if valid is None else jnp.where(valid[:, :, None], y, 0)), final


def selective_scan_tree(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "E M"],
    B: Float[Array, "B T M"],
    C: Float[Array, "B T M"],
    parents: Int[Array, "B T"],
    *,
    D: Float[Array, " E"] | None = None,
    z: Float[Array, "B T E"] | None = None,
    state: Float[Array, "B E M"] | None = None,
) -> Float[Array, "B T E"]:
    """Runs the selective scan over a tree of nodes, each taking its state from its parent.

    y of a node equals the last y of a plain scan along the path from the root to it. No state is
    returned: after verification the accepted path is run again by `selective_scan`.

    Args:
        x: inputs of the nodes; dt, B, C, z likewise.
        dt: step sizes.
        A: the state matrix's diagonal.
        B: input projections.
        C: output projections.
        parents: index of each node's parent, smaller than its own (topological order); -1 is the
            carried state. Values are data, so they are not checked.
        D: skip weights.
        z: gate.
        state: the carried state, float32; None means zeros.

    Returns:
        y in x.dtype.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    _check(x, dt, A, B, C, D, z, state)
    batch, nodes, inner = x.shape
    check_array(_OP, "parents", parents, (batch, nodes), "integer")
    if state is None:
        state = jnp.zeros((batch, inner, A.shape[1]), jnp.float32)
    return tree.run_tree(x, dt, A, B, C, parents, D=D, z=z, state=state)


def _preferred(length: int) -> tuple[str, ...]:
    """Names for this device and length, fastest first."""
    if length == 1:
        return ("xla_sequential",)
    if (platform := target_platform()) == "cpu":
        return ("xla_chunked",)
    kernels = {"gpu": ("pallas_mosaic_gpu", "pallas_triton"), "tpu": ("pallas_tpu",)}
    # Behind the kernels comes the parallel form where it fits: a loop over time crawls there.
    return (*kernels[platform], "xla_associative", "xla_chunked")


def _check(x, dt, A, B, C, D, z, state) -> None:
    check_array(_OP, "x", x, "B T E")
    check_array(_OP, "A", A, "E M")
    batch, length, inner = x.shape
    states = A.shape[1]
    check_array(_OP, "dt", dt, (batch, length, inner))
    check_array(_OP, "A", A, (inner, states))
    check_array(_OP, "B", B, (batch, length, states))
    check_array(_OP, "C", C, (batch, length, states))
    if D is not None:
        check_array(_OP, "D", D, (inner,))
    if z is not None:
        check_array(_OP, "z", z, (batch, length, inner))
    if state is not None:
        check_array(_OP, "state", state, (batch, inner, states), "float32")
