"""The product that gradients of weights are, in the layout that a CPU multiplies fastest."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Float

from .compat import target_platform


def transposed_product(
    x: Float[Array, "*B R D"], y: Float[Array, "*B R F"], dtype: jnp.dtype | None = None
) -> Float[Array, "*B D F"]:
    """`x^T y`, the sum over rows: with y the cotangent of `x @ W`, the cotangent of W.

    XLA's CPU backend (JAX 0.12) has fast bfloat16 products for a left factor in memory row by row
    only. Asked for a sum over the left factor's first axis, or given a transposed view, it converts
    to float32 and takes a general routine, two to three times as slow (docs/performance.md). So x
    is copied, which costs little beside the product.

    Args:
        x: the left factor, transposed.
        y: in x's dtype.
        dtype: of the result; x's when None.
    """
    swapped = x.swapaxes(-1, -2)
    if target_platform() != "cpu":
        return jnp.matmul(swapped, y, preferred_element_type=dtype)
    rows = with_layout_constraint(swapped, Layout(tuple(range(swapped.ndim))))
    # Behind the barrier a transpose of the result stays one. XLA would make it a product with
    # swapped factors, which it has not: "Unsupported element type for DotThunk".
    return lax.optimization_barrier(jnp.matmul(rows, y, preferred_element_type=dtype))
