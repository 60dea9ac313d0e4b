"""Mamba-2's SSD layer as its recurrence: float32, one loop over time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def run(
    x: Float[Array, "B T N P"],
    dt: Float[Array, "B T N"],
    A: Float[Array, " N"],
    B: Float[Array, "B T G M"],
    C: Float[Array, "B T G M"],
    *,
    D: Float[Array, " N"] | None,
    state: Float[Array, "B N P M"],
    reset: Bool[Array, "B T"] | None,
    chunk: int | None = None,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P M"]]:
    """Computes arXiv 2405.21060, equation 1, with a scalar A per head.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T and y_t = h_t C_t + D x_t. `chunk` is not used: a
    recurrence has no chunks.

    Returns:
        y in x.dtype and the state after the last step, float32.
    """
    del chunk
    per_group = x.shape[2] // B.shape[2]
    x32, dt32, A32 = (v.astype(jnp.float32) for v in (x, dt, A))
    B32, C32 = (jnp.repeat(v.astype(jnp.float32), per_group, axis=2) for v in (B, C))
    if reset is None:
        reset = jnp.zeros(x.shape[:2], jnp.bool_)

    def step(h, at_t):
        x_t, dt_t, B_t, C_t, reset_t = at_t
        h = jnp.where(reset_t[:, None, None, None], 0.0, h)
        decay = jnp.exp(dt_t * A32)[:, :, None, None]
        h = decay * h + (dt_t[:, :, None] * x_t)[..., None] * B_t[:, :, None, :]
        return h, jnp.sum(h * C_t[:, :, None, :], axis=-1)

    over_time = tuple(jnp.moveaxis(v, 1, 0) for v in (x32, dt32, B32, C32, reset))
    final, y = jax.lax.scan(step, state.astype(jnp.float32), over_time)
    y = jnp.moveaxis(y, 0, 1)
    if D is not None:
        y = y + D.astype(jnp.float32)[:, None] * x32
    return y.astype(x.dtype), final
