"""The depthwise causal convolution as its sum: float32, one loop over time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def activate(y: Float[Array, "..."], activation: str | None) -> Float[Array, "..."]:
    """Applies "silu" or nothing."""
    return y if activation is None else jax.nn.silu(y)


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
    """Computes y_t = sum_w weight_w x_{t-(W-1)+w} + bias over a window that moves one step a time.

    Returns:
        y in x.dtype (0 where invalid) and the window after the last valid step in state.dtype.
    """
    batch, length, _ = x.shape
    x32, weight32 = x.astype(jnp.float32), weight.astype(jnp.float32)
    bias32 = 0.0 if bias is None else bias.astype(jnp.float32)
    if reset is None:
        reset = jnp.zeros((batch, length), jnp.bool_)
    if valid is None:
        valid = jnp.ones((batch, length), jnp.bool_)

    def step(window, at_t):
        x_t, reset_t, valid_t = at_t
        before = jnp.where(reset_t[:, None, None], 0.0, window)
        full = jnp.concatenate([before, x_t[:, None, :]], axis=1)
        y_t = activate(jnp.sum(full * weight32, axis=1) + bias32, activation)
        window = jnp.where(valid_t[:, None, None], full[:, 1:], window)
        return window, jnp.where(valid_t[:, None], y_t, 0.0)

    over_time = tuple(jnp.moveaxis(v, 1, 0) for v in (x32, reset, valid))
    window, y = jax.lax.scan(step, state.astype(jnp.float32), over_time)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), window.astype(state.dtype)
