"""Attention for XLA: grouped heads without repeating keys, scores in float32."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from .mask import AttentionMask


def attention_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Same function as the reference; the key/value heads are never repeated in memory."""
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, queries, kv_heads, -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = mask.dense()[:, None, None]
    # The floor is finite so that a row without any visible key gives weights of zero, not NaN.
    scores = jnp.where(visible, scores, -1e30)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weight = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = jnp.sum(weight, axis=-1)
    # Memory that was never written may hold NaN, and zero times NaN is NaN.
    v = jnp.where(mask.key_is_written()[:, :, None, None], v, 0)
    weight = weight.astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weight, v, preferred_element_type=jnp.float32)
    safe = jnp.where(total > 0, total, 1.0)
    out = out / jnp.moveaxis(safe, -1, 1)[..., None]
    log_total = jnp.where(total > 0, jnp.log(safe) + peak[..., 0], -jnp.inf)
    log_total = jnp.moveaxis(log_total, -1, 1).reshape(batch, queries, heads)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype), log_total
