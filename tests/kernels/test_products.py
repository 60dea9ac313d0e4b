"""The product of a weight's gradient: its values, and that XLA on a CPU takes it in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.compat import assume_platform
from genlab.kernels.products import transposed_product

rng = np.random.default_rng(0)


def of(shape, dtype):
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wanted", [None, jnp.float32])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_is_the_sum_over_rows(dtype, wanted, batch):
    x, y = of((*batch, 9, 5), dtype), of((*batch, 9, 7), dtype)
    got = jax.jit(transposed_product, static_argnums=2)(x, y, wanted)
    assert got.dtype == (dtype if wanted is None else wanted)
    want = np.einsum("...rd,...rf->...df", np.asarray(x, np.float64), np.asarray(y, np.float64))
    rounded = got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=0.01 if rounded else 1e-5, atol=1e-4
    )


def test_a_transposed_result_and_transposed_arguments():
    """XLA merges transposes into products, one of which it cannot run in bfloat16."""
    x, y = of((2, 64, 96), jnp.bfloat16), of((2, 128, 64), jnp.bfloat16)

    def f(x, y):
        found = transposed_product(x, y.swapaxes(1, 2), jnp.float32)
        return found.swapaxes(1, 2).astype(jnp.bfloat16)

    want = np.einsum("brd,bfr->bfd", np.asarray(x, np.float64), np.asarray(y, np.float64))
    np.testing.assert_allclose(np.asarray(jax.jit(f)(x, y), np.float64), want, rtol=0.02, atol=0.1)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 multiplies bfloat16 in float32 on CPUs anyway"
)
def test_bfloat16_is_not_converted_before_the_product():
    x, y = of((512, 256), jnp.bfloat16), of((512, 384), jnp.bfloat16)

    def text(f):
        return jax.jit(f).lower(x, y).compile().as_text()

    assert "f32[512," not in text(transposed_product)
    assert "f32[512," in text(lambda x, y: jnp.einsum("rd,rf->df", x, y))


def test_other_platforms_get_a_plain_product():
    with assume_platform("gpu"):
        x, y = of((4, 2), "float32"), of((4, 3), "float32")
        jaxpr = str(jax.make_jaxpr(transposed_product)(x, y))
    assert "layout" not in jaxpr
    assert "barrier" not in jaxpr
