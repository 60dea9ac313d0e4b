"""Paged attention from the equation, in float32, one row and one query after the other."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from .plan import Plan


def paged_attention_reference(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "pool block K H"],
    v_pool: Float[Array, "pool block K H"],
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Computes `softmax(q k^T * scale) v` over the keys that the plan makes visible.

    Returns:
        The output in q's dtype (zeros where no key is visible) and the log of the softmax
        denominator in float32 (-inf there).
    """
    groups = q.shape[2] // k_pool.shape[2]
    position = jnp.arange(plan.table.shape[1] * k_pool.shape[1], dtype=jnp.int32)

    def query(q, keys, values, lo, hi):
        visible = (lo <= position) & (position <= hi)
        keys, values = (jnp.where(visible[:, None, None], x, 0.0) for x in (keys, values))
        scores = jnp.einsum("nh,snh->ns", q, keys, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        log_total = jax.nn.logsumexp(scores, axis=1, keepdims=True)
        weight = jnp.where(visible, jnp.exp(scores - log_total), 0.0)
        return jnp.einsum("ns,snh->nh", weight, values, precision="highest"), log_total[:, 0]

    def row(of):
        q, table, lo, hi = of
        keys, values = (
            jnp.repeat(pool[table].reshape(-1, *pool.shape[2:]).astype(jnp.float32), groups, axis=1)
            for pool in (k_pool, v_pool)
        )
        return jax.lax.map(lambda of: query(of[0], keys, values, *of[1:]), (q, lo, hi))

    out, log_total = jax.lax.map(row, (q.astype(jnp.float32), plan.table, plan.lo, plan.hi))
    return out.astype(q.dtype), log_total
