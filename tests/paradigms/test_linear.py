"""Products with weights: the same whatever the number of rows, and in the shape a CPU likes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.compat import assume_platform
from genlab.paradigms.layers.linear import (
    FEWEST_ROWS_CPU_BFLOAT16,
    linear,
    product,
    split_columns,
)

rng = np.random.default_rng(0)
X, W = rng.standard_normal((3, 2, 16), np.float32), rng.standard_normal((16, 24), np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_row_is_the_row_alone(dtype):
    x, w = jnp.asarray(X, dtype), jnp.asarray(W)
    together = linear(x, w)
    assert together.dtype == dtype
    want = np.asarray(x, np.float64) @ np.asarray(w.astype(dtype), np.float64)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(together, np.float64), want, rtol=0.02, atol=tolerance)
    alone = linear(x[:1, :1], w)
    assert alone.shape == (1, 1, 24)
    np.testing.assert_allclose(
        np.asarray(alone, np.float64)[0, 0], np.asarray(together, np.float64)[0, 0],
        rtol=0.01, atol=tolerance,
    )  # fmt: skip


def test_gradients_pass_through_the_rows_that_were_added():
    x, w = jnp.asarray(X[0, :1], jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    got = jax.grad(lambda x, w: linear(x, w).astype(jnp.float32).sum(), (0, 1))(x, w)
    want = jax.grad(lambda x, w: (x @ w).astype(jnp.float32).sum(), (0, 1))(x, w)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=0.02)


def test_either_layout_and_the_type_asked_for():
    x = jnp.asarray(X[0, :1], jnp.bfloat16)
    columns = product(x, W, "rd,df->rf", jnp.float32)
    rows = product(x, W.T, "rd,fd->rf", jnp.float32)
    assert columns.dtype == rows.dtype == jnp.float32
    np.testing.assert_allclose(columns, rows, rtol=1e-5, atol=1e-5)


def test_one_row_of_bfloat16_on_a_cpu_and_nothing_else_gets_company():
    def padded(x, platform):
        with assume_platform(platform):
            return " pad[" in str(jax.make_jaxpr(linear)(x, jnp.asarray(W)))

    one = jnp.asarray(X[0, :1], jnp.bfloat16)
    assert FEWEST_ROWS_CPU_BFLOAT16 > 1
    assert padded(one, "cpu")
    assert not padded(one, "gpu")
    assert not padded(one.astype(jnp.float32), "cpu")
    assert not padded(jnp.asarray(X[0], jnp.bfloat16), "cpu")


def test_parts_are_slices_and_so_are_their_gradients():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 9), np.float32))
    weight = jnp.arange(1.0, 55.0, dtype=jnp.float32).reshape(2, 3, 9)

    def by_slices(x):
        return x[..., :4], x[..., 4:5], x[..., 5:]

    def loss(split, x):
        parts = zip(split(x), by_slices(weight), strict=True)
        return sum(jnp.sum(jnp.sin(v) * w) for v, w in parts)

    def by_sizes(x):
        return split_columns(x, (4, 1, 4))

    for got, want in zip(by_sizes(x), by_slices(x), strict=True):
        np.testing.assert_array_equal(got, want)
    got, want = (jax.grad(functools.partial(loss, split))(x) for split in (by_sizes, by_slices))
    np.testing.assert_array_equal(got, want)
