"""Products of activations with weight matrices, in the shape that the device multiplies fastest."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ...kernels.compat import target_platform
from ...kernels.products import transposed_product

# On a CPU, XLA (JAX 0.12) multiplies a single row of bfloat16 with a matrix at 2 GB/s, but two to
# sixteen rows at the speed of memory: 94M parameters took 75 ms with one row and 16 ms with four
# (docs/performance.md). In float32 one row is as fast as any.
FEWEST_ROWS_CPU_BFLOAT16 = 4


def linear(x: Float[Array, "*B D"], weight: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """`x @ weight`, the weight in x's dtype. Differentiable in reverse mode."""
    weight = weight.astype(x.dtype)
    rows = math.prod(x.shape[:-1])
    if _one_slow_row(x, rows):
        return product(x, weight, "rd,df->rf")
    y = _linear(x.reshape(rows, x.shape[-1]), weight)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@jax.custom_vjp
def _linear(x: Float[Array, "R D"], weight: Float[Array, "D F"]) -> Float[Array, "R F"]:
    return jnp.einsum("rd,df->rf", x, weight)


def _linear_forward(x, weight):
    return _linear(x, weight), (x, weight)


def _linear_backward(saved, dy):
    x, weight = saved
    return jnp.einsum("rf,df->rd", dy, weight), transposed_product(x, dy)


_linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_columns(x: Float[Array, "*B F"], sizes: tuple[int, ...]) -> tuple[Array, ...]:
    """The parts of a product that several projections share, by their widths.

    Their cotangents are put side by side, where XLA's own backward pass adds up padded ones.
    """
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(x[..., end - size : end] for size, end in zip(sizes, ends, strict=True))


def _split_forward(x, sizes):
    return split_columns(x, sizes), None


def _split_backward(sizes, _, parts):
    # Made before they are joined, not while: a fused concatenation asks of every value where it
    # belongs.
    return (jnp.concatenate(jax.lax.optimization_barrier(parts), axis=-1),)


split_columns.defvjp(_split_forward, _split_backward)


def product(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D F"] | Float[Array, "F D"],
    spec: str,
    preferred_element_type: jnp.dtype | None = None,
) -> Float[Array, "*B F"]:
    """A product over x's last axis.

    Args:
        x: activations.
        weight: cast to x's dtype.
        spec: for `einsum`, x as two axes: rows and D.
        preferred_element_type: of the result; x's dtype when None.
    """
    weight = weight.astype(x.dtype)
    rows = math.prod(x.shape[:-1])
    flat = x.reshape(rows, x.shape[-1])
    few = _one_slow_row(x, rows)
    if few:
        flat = jnp.pad(flat, ((0, FEWEST_ROWS_CPU_BFLOAT16 - rows), (0, 0)))
    y = jnp.einsum(spec, flat, weight, preferred_element_type=preferred_element_type)
    y = y[:rows] if few else y
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _one_slow_row(x: Array, rows: int) -> bool:
    return rows == 1 and x.dtype == jnp.bfloat16 and target_platform() == "cpu"
