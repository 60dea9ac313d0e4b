"""The helper that lowers for absent devices: every Pallas backend is recognised by its call."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from .lowering import kernels_in, lowered_text

X = jax.ShapeDtypeStruct((128, 128), jnp.float32)


def double(x, out):
    out[...] = x[...] * 2.0


def mosaic_gpu(x):
    return plgpu.kernel(double, out_type=X)(x)


def tpu(x):
    return pl.pallas_call(double, out_shape=X, compiler_params=pltpu.CompilerParams())(x)


def triton(x):
    return pl.pallas_call(double, out_shape=X, compiler_params=pltriton.CompilerParams())(x)


@pytest.mark.parametrize(
    ("platform", "function", "kernel"),
    [
        ("cuda", mosaic_gpu, "pallas_mosaic_gpu"),
        ("cuda", triton, "pallas_triton"),
        ("tpu", tpu, "pallas_tpu"),
    ],
)
def test_a_kernel_is_named_by_its_backend(platform, function, kernel):
    text = lowered_text(platform, lambda x: function(x) + 1.0, X)
    assert kernels_in(text) == {kernel}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_plain_jax_holds_no_kernel(platform):
    assert not kernels_in(lowered_text(platform, lambda x: x @ x, X))
