"""The short depthwise causal convolution of the SSM mixers: checks and choice."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...errors import suggest
from ..dispatch import Implementation, KernelArgumentError, check_array, choose, valid_mask
from . import reference, tree, xla

_OP = "causal_conv1d"

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(reference.run),
    "xla": Implementation(xla.run),
}


def causal_conv1d(
    x: Float[Array, "B T E"],
    weight: Float[Array, "W E"],
    bias: Float[Array, " E"] | None = None,
    *,
    state: Float[Array, "B W-1 E"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    activation: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """Convolves each channel with its own W taps, looking at the past only.

    y_t = activation(sum_w weight_w x_{t - (W - 1) + w} + bias): weight[W - 1] meets the newest
    input. Calls of any size, also below W - 1 steps, chained through `state` equal one call.

    Args:
        x: inputs.
        weight: taps, oldest first.
        bias: per channel; None means none.
        state: the W - 1 inputs before the first step, oldest first; None means zeros (float32).
        reset: True where a document begins: no tap at or after it reaches an input before it.
        lengths: valid steps per row, which come first; later steps give y = 0, do not enter the
            state, and are never read (they may be NaN).
        activation: None or "silu".
        implementation: see `kernels.dispatch`.

    Returns:
        y in x.dtype and the last W - 1 valid inputs, oldest first, in the state's dtype; inputs
        before the last reset are zero there.

    Raises:
        KernelArgumentError: a shape, dtype, activation or implementation is wrong.
    """
    _check(x, weight, bias, state, activation)
    batch, length, inner = x.shape
    if reset is not None:
        check_array(_OP, "reset", reset, (batch, length), "bool")
    valid = None
    if lengths is not None:
        check_array(_OP, "lengths", lengths, (batch,), "integer")
        valid = valid_mask(lengths, length)
        x = jnp.where(valid[:, :, None], x, 0)
        reset = None if reset is None else reset & valid
    if state is None:
        state = jnp.zeros((batch, weight.shape[0] - 1, inner), jnp.float32)
    if length == 0:
        return jnp.zeros_like(x), state
    arguments = dict(state=state, reset=reset, valid=valid, activation=activation)
    name = choose(_OP, IMPLEMENTATIONS, ("xla",), implementation, x, weight, bias, **arguments)
    return IMPLEMENTATIONS[name].run(x, weight, bias, **arguments)


def causal_conv1d_tree(
    x: Float[Array, "B T E"],
    weight: Float[Array, "W E"],
    bias: Float[Array, " E"] | None,
    parents: Int[Array, "B T"],
    *,
    state: Float[Array, "B W-1 E"] | None = None,
    activation: str | None = None,
) -> Float[Array, "B T E"]:
    """Convolves along the paths of a tree of nodes; `parents` as in `selective_scan_tree`.

    Raises:
        KernelArgumentError: a shape, dtype or activation is wrong.
    """
    _check(x, weight, bias, state, activation)
    batch, nodes, inner = x.shape
    check_array(_OP, "parents", parents, (batch, nodes), "integer")
    if state is None:
        state = jnp.zeros((batch, weight.shape[0] - 1, inner), jnp.float32)
    return tree.run_tree(x, weight, bias, parents, state=state, activation=activation)


def _check(x, weight, bias, state, activation) -> None:
    check_array(_OP, "x", x, "B T E")
    check_array(_OP, "weight", weight, "W E")
    batch, _, inner = x.shape
    width = weight.shape[0]
    check_array(_OP, "weight", weight, (max(width, 1), inner))
    if bias is not None:
        check_array(_OP, "bias", bias, (inner,))
    if state is not None:
        check_array(_OP, "state", state, (batch, width - 1, inner))
    if activation not in (None, "silu"):
        hint = suggest(str(activation), ["silu"])
        raise KernelArgumentError(f"{_OP}: activation is {activation!r}; want None or 'silu'{hint}")
