"""The grouped matmul as its equation: float32, one row after another."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def run(
    x: Float[Array, "T D"], w: tuple[Float[Array, "D F"], ...], group_sizes: Int[Array, " E"]
) -> Float[Array, "T F"]:
    """Computes y_t = x_t W_g(t), where g(t) is the first group that ends behind row t.

    Rows behind the last group give 0.
    """
    ends = jnp.cumsum(group_sizes)
    stacked = jnp.stack(w).astype(jnp.float32)

    def one_row(at: tuple[Array, Array]) -> Array:
        x_t, t = at
        group = jnp.sum(ends <= t)
        # Both are masked before the product: what a row of no group holds may be NaN, and the
        # matrix at hand is then of a group that need not have rows.
        inside = group < len(w)
        x_t = jnp.where(inside, x_t.astype(jnp.float32), 0.0)
        matrix = jnp.where(inside, stacked[group], 0.0)
        return jnp.sum(x_t[:, None] * matrix, axis=0)

    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jax.lax.map(one_row, (x, rows)).astype(x.dtype)
