"""The causal convolution in plain JAX: W shifted multiply-adds, which XLA fuses into one pass.

There is no Pallas kernel, on any device: the op reads x once and writes y once as it is, bias and
activation included, and XLA can fuse what comes before and behind it too, which a kernel ends.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .reference import activate


def run(
    x: Float[Array, "B T E"],
    weight: Float[Array, "W E"],
    bias: Float[Array, " E"] | None,
    *,
    state: Float[Array, "B W-1 E"],
    reset: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
    activation: str | None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """Arguments and results as in `reference.run`."""
    length, width = x.shape[1], weight.shape[0]
    weight = weight.astype(jnp.float32)
    inputs = jnp.concatenate([state.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    document = None  # number of resets up to each input; the carried ones are in document 0
    if reset is not None:
        document = jnp.pad(jnp.cumsum(reset, axis=1), ((0, 0), (width - 1, 0)))
    y = 0.0 if bias is None else bias.astype(jnp.float32)
    for tap in range(width):
        seen = inputs[:, tap : tap + length]
        if document is not None and tap < width - 1:
            same = document[:, tap : tap + length] == document[:, width - 1 :]
            seen = jnp.where(same[:, :, None], seen, 0.0)
        y = y + weight[tap] * seen
    y = activate(y, activation)
    if document is not None:
        inputs = jnp.where((document == document[:, -1:])[:, :, None], inputs, 0.0)
    if valid is None:
        window = inputs[:, length:]
    else:
        # Inputs `n .. n + W - 2` of the concatenation are the last W - 1 of n valid steps.
        y = jnp.where(valid[:, :, None], y, 0.0)
        at = jnp.sum(valid, axis=1)[:, None] + jnp.arange(width - 1)
        window = jnp.take_along_axis(inputs, at[:, :, None], axis=1)
    return y.astype(x.dtype), window.astype(state.dtype)
