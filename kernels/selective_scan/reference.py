"""Mamba's selective scan exactly as in the paper: float32, one loop over time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def run(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "E M"],
    B: Float[Array, "B T M"],
    C: Float[Array, "B T M"],
    *,
    D: Float[Array, " E"] | None,
    z: Float[Array, "B T E"] | None,
    state: Float[Array, "B E M"],
    reset: Bool[Array, "B T"] | None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B E M"]]:
    """Computes arXiv 2312.00752, equations 1a, 1b and 2a with the discretisation of section 2.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t and y_t = C_t h_t + D x_t; with z, y_t silu(z_t).

    Returns:
        y in x.dtype and the state after the last step, float32.
    """
    x32, dt32, A32, B32, C32 = (v.astype(jnp.float32) for v in (x, dt, A, B, C))
    if reset is None:
        reset = jnp.zeros(x.shape[:2], jnp.bool_)

    def step(h, at_t):
        x_t, dt_t, B_t, C_t, reset_t = at_t
        h = jnp.where(reset_t[:, None, None], 0.0, h)
        h = jnp.exp(dt_t[:, :, None] * A32) * h + (dt_t * x_t)[:, :, None] * B_t[:, None, :]
        return h, jnp.sum(h * C_t[:, None, :], axis=-1)

    over_time = tuple(jnp.moveaxis(v, 1, 0) for v in (x32, dt32, B32, C32, reset))
    final, y = jax.lax.scan(step, state.astype(jnp.float32), over_time)
    y = jnp.moveaxis(y, 0, 1)
    if D is not None:
        y = y + D.astype(jnp.float32) * x32
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(x.dtype), final
