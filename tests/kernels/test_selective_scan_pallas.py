"""The selective scan's kernels for accelerators against the reference, without an accelerator."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels import dispatch
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.selective_scan import (
    pallas_mosaic_gpu,
    pallas_triton,
    selective_scan,
    shapes,
)

from .interpreted import HAS_GPU_INTERPRETER, PLATFORM, interpreted, simulated_tpu
from .lowering import kernels_in, lowered_text

BACKENDS = tuple(PLATFORM)
QUICK = ("pallas_tpu", "pallas_triton")
# Mosaic GPU's interpreter is slow: one case by default, the others with the slow tests.
RUN = (*QUICK, "pallas_mosaic_gpu") if HAS_GPU_INTERPRETER else QUICK
EACH = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in RUN[len(QUICK) :])]
BLOCK = 4
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 7)
CUDA = {"gpu": "cuda", "tpu": "tpu"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several chunks and several blocks of channels at tiny sizes."""
    monkeypatch.setattr(shapes, "TPU_CHUNK", BLOCK)
    monkeypatch.setattr(shapes, "TPU_SHORTEST", 1)
    monkeypatch.setattr(shapes, "TPU_LANES", 4)
    monkeypatch.setattr(shapes, "TPU_STATE_VALUES", 20)
    monkeypatch.setattr(shapes, "GPU_SEGMENT", BLOCK)
    monkeypatch.setattr(pallas_triton, "LANES", 4)
    monkeypatch.setattr(pallas_mosaic_gpu, "LANES", 4)
    monkeypatch.setattr(pallas_mosaic_gpu, "TOGETHER", 2)
    monkeypatch.setattr(pallas_mosaic_gpu, "_TILE", 2)


def make(length, inner=6, states=5, batch=2, dtype=np.float32):
    """Random arguments of the op by name, and weights for the sum that is differentiated."""
    rng = np.random.default_rng(length)  # NumPy: a jax.random call would compile for every shape

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    arguments = {
        "x": normal(batch, length, inner).astype(dtype),
        "dt": np.log1p(np.exp(normal(batch, length, inner) - 1)),
        "A": -np.exp(normal(inner, states)),
        "B": normal(batch, length, states).astype(dtype),
        "C": normal(batch, length, states).astype(dtype),
        "D": normal(inner),
        "z": normal(batch, length, inner).astype(dtype),
        "state": normal(batch, inner, states),
    }
    return arguments, (normal(batch, length, inner), normal(batch, inner, states))


def documents(length):
    """Resets inside, at step 0 and one step before the end; the second row ends early."""
    reset = np.zeros((2, length), bool)
    reset[0, [0, length // 2]] = True
    reset[1, [length // 3, max(length - 2, 0)]] = True
    return {"reset": reset, "lengths": np.array([length, max(length - 2, 0)], np.int32)}


@functools.partial(jax.jit, static_argnames="implementation")
def everything(arguments, weights, reset=None, lengths=None, *, implementation):
    """y, the final state, and the gradient of a weighted sum of both by argument."""

    def loss(arguments):
        y, final = selective_scan(
            **arguments, reset=reset, lengths=lengths, implementation=implementation
        )
        weighted = jnp.sum(y.astype(jnp.float32) * weights[0]) + jnp.sum(final * weights[1])
        return weighted, (y, final)

    gradients, (y, final) = jax.grad(loss, has_aux=True)(arguments)
    return {"y": y, "final": final, **gradients}


def assert_equal(got, want, rtol=2e-5):
    """Equal within rounding of the largest element of each array."""
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        one, other = (np.asarray(v, np.float32) for v in (got[name], value))
        assert np.isfinite(one).all(), name
        limit = rtol * (1 + np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=name)


def check(implementation, arguments, weights, rtol=2e-5, **options):
    want = everything(arguments, weights, **options, implementation="reference")
    with interpreted(implementation):
        got = everything(arguments, weights, **options, implementation=implementation)
    assert_equal(got, want, rtol)
    return got


@pytest.mark.parametrize(
    ("implementation", "length"),
    [*((name, BLOCK + 1) for name in RUN), *((name, 2 * BLOCK) for name in QUICK)],
)
def test_all_results_and_gradients_equal_the_reference(implementation, length):
    check(implementation, *make(length), **documents(length))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("inner", "states", "with_documents"), [(8, 4, False), (5, 3, True), (3, 16, True)]
)
def test_every_length_and_odd_sizes(implementation, length, with_documents, inner, states):
    options = documents(length) if with_documents else {}
    check(implementation, *make(length, inner, states), **options)


@pytest.mark.parametrize("implementation", EACH)
def test_skip_gate_and_state_are_optional(implementation):
    arguments, weights = make(BLOCK + 1)
    bare = {k: v for k, v in arguments.items() if k not in ("D", "z", "state")}
    check(implementation, bare, weights)


@pytest.mark.parametrize("implementation", EACH)
def test_bfloat16_is_scanned_in_float32(implementation):
    arguments, weights = make(BLOCK + 1, dtype=jnp.bfloat16)
    got = check(implementation, arguments, weights, rtol=2**-7, **documents(BLOCK + 1))
    exact = {k: v.astype(np.float32) for k, v in arguments.items()}
    want = everything(exact, weights, **documents(BLOCK + 1), implementation="reference")
    assert_equal({"final": got["final"]}, {"final": want["final"]})


@pytest.mark.parametrize("implementation", EACH)
def test_padding_and_an_unwritten_state_are_never_read(implementation):
    length = 2 * BLOCK
    arguments, weights = make(length)
    lengths = np.array([BLOCK + 1, 0], np.int32)
    reset = np.zeros((2, length), bool)
    reset[:, 0] = True
    poisoned = {k: v.copy() for k, v in arguments.items()}
    poisoned["state"][0] = np.nan
    for name in ("x", "dt", "B", "C", "z"):
        for row, valid in enumerate(lengths):
            poisoned[name][row, valid:] = np.nan
    options = {"reset": reset, "lengths": lengths}
    want = everything(arguments, weights, **options, implementation="reference")
    with interpreted(implementation):
        got = everything(poisoned, weights, **options, implementation=implementation)
    assert_equal(got, want)


@pytest.mark.parametrize("implementation", EACH)
def test_strong_decay_stays_finite_and_exact(implementation):
    arguments, weights = make(2 * BLOCK)
    arguments["dt"][:, ::3] = 50.0
    arguments["A"][0], arguments["A"][1:] = -4.0, -1.0
    check(implementation, arguments, weights, **documents(2 * BLOCK))


def test_no_two_accesses_race_in_the_simulated_tpu(capfd, caplog):
    arguments, weights = make(BLOCK + 1)
    options = documents(BLOCK + 1)
    want = everything(arguments, weights, **options, implementation="reference")
    with simulated_tpu(capfd, caplog):
        got = everything(arguments, weights, **options, implementation="pallas_tpu")
        jax.block_until_ready(got)
    assert_equal(got, want)


def described(shape, dtype=jnp.bfloat16):
    """Arguments of a real model's call, without values."""
    B, T, E, M = shape
    sizes = {"x": (B, T, E), "dt": (B, T, E), "A": (E, M), "B": (B, T, M), "C": (B, T, M),
             "D": (E,), "z": (B, T, E), "state": (B, E, M)}  # fmt: skip
    given = {k: dtype if k in ("x", "B", "C", "z") else jnp.float32 for k in sizes}
    return {k: jax.ShapeDtypeStruct(sizes[k], given[k]) for k in sizes}


def forward(arguments, implementation=None):
    return selective_scan(**arguments, implementation=implementation)


def backward(arguments, implementation=None):
    def loss(arguments):
        y, final = forward(arguments, implementation)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(final)

    return jax.grad(loss)(arguments)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("function", [forward, backward])
def test_it_lowers_at_the_size_of_mamba_2_8b(implementation, function, monkeypatch):
    monkeypatch.undo()
    platform = CUDA[PLATFORM[implementation]]
    call = functools.partial(function, implementation=implementation)
    text = lowered_text(platform, call, described(shapes.MAMBA_2_8B))
    assert kernels_in(text) == {implementation}
    # Nothing as large as the states of all steps is ever in main memory.
    B, T, E, _ = shapes.MAMBA_2_8B
    sizes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    assert max(np.prod([int(n) for n in size[:-1].split("x")]) for size in sizes) <= B * T * E


@pytest.mark.parametrize(
    ("platform", "chosen"), [("tpu", "pallas_tpu"), ("gpu", "pallas_mosaic_gpu")]
)
def test_the_default_is_the_kernel_where_there_is_one(platform, chosen, monkeypatch):
    monkeypatch.undo()
    text = lowered_text(CUDA[platform], forward, described(shapes.MAMBA_2_8B))
    assert kernels_in(text) == {chosen}
    decode = shapes.MAMBA_2_8B._replace(length=1)
    assert not kernels_in(lowered_text(CUDA[platform], forward, described(decode)))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_it_says_why_it_cannot_run(implementation):
    platform = PLATFORM[implementation].upper()
    reason = f"{implementation}: it needs a {platform}; this program is for a CPU"
    with pytest.raises(KernelArgumentError, match=reason):
        selective_scan(**make(3)[0], implementation=implementation)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_too_many_state_dimensions_are_refused(implementation):
    call = functools.partial(forward, implementation=implementation)
    arguments = described(shapes.MAMBA_2_8B._replace(states=256))
    with assume_platform(PLATFORM[implementation]):
        with pytest.raises(KernelArgumentError, match=f"{implementation}: M is 256; the kernel"):
            jax.eval_shape(call, arguments)
        jax.eval_shape(forward, arguments)


def test_an_older_gpu_gets_the_kernel_made_for_it(monkeypatch):
    monkeypatch.setattr(dispatch, "compute_capability", lambda: 8.6)
    with assume_platform("gpu"):
        with pytest.raises(KernelArgumentError, match="needs a GPU of compute capability 9"):
            selective_scan(**make(3)[0], implementation="pallas_mosaic_gpu")
        jaxpr = jax.make_jaxpr(forward)(described(shapes.MAMBA_2_8B))
    assert "name=selective_scan_forward" in str(jaxpr)
