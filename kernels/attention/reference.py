"""Attention from the equation, in float32, one query at a time in spirit: no tricks."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from .mask import AttentionMask


def attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Computes `softmax(q k^T * scale) v` over the visible keys (Vaswani et al. 2017, eq. 1).

    Returns:
        The output in q's dtype (zeros where no key is visible) and the log of the softmax
        denominator in float32 (-inf there).
    """
    groups = q.shape[2] // k.shape[2]
    written = mask.key_is_written()[:, :, None, None]
    k32 = jnp.repeat(jnp.where(written, k, 0).astype(jnp.float32), groups, axis=2)
    v32 = jnp.repeat(jnp.where(written, v, 0).astype(jnp.float32), groups, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k32, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = mask.dense()[:, None]
    peak = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weight = jnp.where(visible, jnp.exp(jnp.where(visible, scores - peak, 0.0)), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    probability = weight / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bnts,bsnh->btnh", probability, v32, precision="highest")
    log_total = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + peak, -jnp.inf)
    return out.astype(q.dtype), jnp.swapaxes(log_total[..., 0], 1, 2)
