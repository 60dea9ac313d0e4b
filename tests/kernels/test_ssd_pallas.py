"""SSD's kernels for accelerators against the recurrence, without an accelerator."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.ssd import pallas_triton, shapes, ssd

from .interpreted import HAS_GPU_INTERPRETER, PLATFORM, interpreted, simulated_tpu
from .lowering import kernels_in, lowered_text

BACKENDS = tuple(PLATFORM)
QUICK = ("pallas_tpu", "pallas_triton")
# Mosaic GPU's kernel takes bfloat16 and whole tiles only, so it has cases of its own.
MOSAIC = "pallas_mosaic_gpu"
TILE = 64
BLOCK = 4
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 7)
OVER_TIME = ("x", "dt", "B", "C")
CUDA = {"gpu": "cuda", "tpu": "tpu"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several chunks, and several blocks of heads in a group, at tiny sizes."""
    monkeypatch.setattr(shapes, "CHUNK", {"cpu": BLOCK, "gpu": BLOCK, "tpu": BLOCK})
    monkeypatch.setattr(shapes, "TPU_SHORTEST", 1)
    monkeypatch.setattr(shapes, "TPU_STATE_VALUES", 30)
    monkeypatch.setattr(shapes, "GPU_HEADS", 2)
    monkeypatch.setattr(pallas_triton, "_LEAST", 1)


def make(length, heads=8, channels=3, groups=2, states=5, batch=2, dtype=np.float32):
    """Random arguments of the op by name, and weights for the sum that is differentiated."""
    rng = np.random.default_rng(length)  # NumPy: a jax.random call would compile for every shape

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    arguments = {
        "x": normal(batch, length, heads, channels).astype(dtype),
        "dt": np.log1p(np.exp(normal(batch, length, heads) - 1)),
        "A": -np.exp(normal(heads)),
        "B": normal(batch, length, groups, states).astype(dtype),
        "C": normal(batch, length, groups, states).astype(dtype),
        "D": normal(heads),
        "state": normal(batch, heads, channels, states),
    }
    return arguments, tuple(normal(*arguments[name].shape) for name in ("x", "state"))


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
        y, final = ssd(**arguments, reset=reset, lengths=lengths, implementation=implementation)
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


@pytest.mark.parametrize("implementation", QUICK)
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK])
def test_all_results_and_gradients_equal_the_reference(implementation, length):
    check(implementation, *make(length), **documents(length))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", QUICK)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "channels", "groups", "states", "with_documents"),
    [(4, 2, 1, 8, False), (3, 5, 3, 3, True)],
)
def test_every_length_and_odd_sizes(
    implementation, length, with_documents, heads, channels, groups, states
):
    options = documents(length) if with_documents else {}
    check(implementation, *make(length, heads, channels, groups, states), **options)


@pytest.mark.parametrize("implementation", QUICK)
def test_skip_and_state_are_optional(implementation):
    arguments, weights = make(BLOCK + 1)
    bare = {k: v for k, v in arguments.items() if k not in ("D", "state")}
    check(implementation, bare, weights)


@pytest.mark.parametrize("implementation", QUICK)
def test_bfloat16_is_computed_in_float32(implementation):
    arguments, weights = make(BLOCK + 1, dtype=jnp.bfloat16)
    got = check(implementation, arguments, weights, rtol=2**-7, **documents(BLOCK + 1))
    exact = {k: v.astype(np.float32) for k, v in arguments.items()}
    want = everything(exact, weights, **documents(BLOCK + 1), implementation="reference")
    assert_equal({"final": got["final"]}, {"final": want["final"]})


@pytest.mark.parametrize("implementation", QUICK)
def test_padding_and_an_unwritten_state_are_never_read(implementation):
    length = 2 * BLOCK
    arguments, weights = make(length)
    lengths = np.array([BLOCK + 1, 0], np.int32)
    reset = np.zeros((2, length), bool)
    reset[:, 0] = True
    poisoned = {k: v.copy() for k, v in arguments.items()}
    poisoned["state"][0] = np.nan
    for name in OVER_TIME:
        for row, valid in enumerate(lengths):
            poisoned[name][row, valid:] = np.nan
    options = {"reset": reset, "lengths": lengths}
    want = everything(arguments, weights, **options, implementation="reference")
    with interpreted(implementation):
        got = everything(poisoned, weights, **options, implementation=implementation)
    assert_equal(got, want)


@pytest.mark.parametrize("implementation", QUICK)
def test_strong_decay_stays_finite_and_exact(implementation):
    arguments, weights = make(2 * BLOCK)
    arguments["dt"][:, ::3] = 50.0
    arguments["A"][0], arguments["A"][1:] = -40.0, -1.0
    check(implementation, arguments, weights, **documents(2 * BLOCK))


@pytest.mark.parametrize("implementation", QUICK)
def test_weak_decay_after_strong_decay_keeps_its_digits(implementation, monkeypatch):
    # Sums of logs reach -3000 in the chunk; a plain difference of them is off by 1e-4.
    monkeypatch.setattr(shapes, "CHUNK", {"gpu": 64, "tpu": 64})
    arguments, _ = make(64, heads=2)
    arguments["A"][:] = -1.0
    arguments["dt"][:, :-4], arguments["dt"][:, -4:] = 50.0, 0.0123
    arguments["x"][:, :-4] *= 0.02
    want = ssd(**arguments, implementation="reference")
    with interpreted(implementation):
        got = ssd(**arguments, implementation=implementation)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * float(jnp.abs(w).max()))


def make_tiles(length, groups=1):
    """Arguments that Mosaic GPU's kernel takes: two blocks of heads in a group."""
    return make(length, 4 * groups, TILE, groups, TILE, dtype=jnp.bfloat16)


def check_tiles(arguments, weights, **options):
    """Results in bfloat16 within its rounding; those in float32 within its own."""
    got = check(MOSAIC, arguments, weights, rtol=2**-7, **options)
    want = everything(arguments, weights, **options, implementation="reference")
    exact = {k: v for k, v in want.items() if v.dtype == jnp.float32}
    assert {"final", "dt", "A"} <= exact.keys()
    assert_equal(got, exact)


def test_tiles_of_two_chunks_equal_the_reference():
    check_tiles(*make_tiles(TILE + 1), **documents(TILE + 1))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1, 199])
@pytest.mark.parametrize("groups", [1, 2])
def test_tiles_of_every_length_equal_the_reference(length, groups):
    options = documents(length) if groups == 1 else {}
    check_tiles(*make_tiles(length, groups), **options)


@pytest.mark.slow
def test_tiles_without_skip_and_state_and_with_strong_decay():
    arguments, weights = make_tiles(TILE + 1)
    arguments["dt"][:, ::3] = 50.0
    arguments["A"][0], arguments["A"][1:] = -40.0, -1.0
    bare = {k: v for k, v in arguments.items() if k not in ("D", "state")}
    check_tiles(bare, weights)


@pytest.mark.slow
def test_tiles_never_read_padding_nor_an_unwritten_state():
    length = TILE + 1
    arguments, weights = make_tiles(length)
    lengths = np.array([TILE - 3, 0], np.int32)
    options = {"reset": np.tile(np.arange(length) == 0, (2, 1)), "lengths": lengths}
    poisoned = {k: v.copy() for k, v in arguments.items()}
    poisoned["state"][0] = np.nan
    for name in OVER_TIME:
        for row, valid in enumerate(lengths):
            poisoned[name][row, valid:] = np.nan
    want = everything(arguments, weights, **options, implementation="reference")
    with interpreted(MOSAIC):
        got = everything(poisoned, weights, **options, implementation=MOSAIC)
    assert_equal(got, want, rtol=2**-7)


def test_no_two_accesses_race_in_the_simulated_tpu(capfd, caplog):
    arguments, weights = make(BLOCK + 1, heads=2, groups=1)
    options = documents(BLOCK + 1)
    want = everything(arguments, weights, **options, implementation="reference")
    with simulated_tpu(capfd, caplog):
        got = everything(arguments, weights, **options, implementation="pallas_tpu")
        jax.block_until_ready(got)
    assert_equal(got, want)


def described(shape, dtype=jnp.bfloat16):
    """Arguments of a real model's call, without values."""
    B, T, N, P, G, M = shape
    sizes = {"x": (B, T, N, P), "dt": (B, T, N), "A": (N,), "B": (B, T, G, M), "C": (B, T, G, M),
             "D": (N,), "state": (B, N, P, M)}  # fmt: skip
    given = {k: dtype if k in ("x", "B", "C") else jnp.float32 for k in sizes}
    return {k: jax.ShapeDtypeStruct(sizes[k], given[k]) for k in sizes}


def forward(arguments, implementation=None, chunk=None):
    return ssd(**arguments, implementation=implementation, chunk=chunk)


def backward(arguments, implementation=None):
    def loss(arguments):
        y, final = forward(arguments, implementation)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(final)

    return jax.grad(loss)(arguments)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("function", [forward, backward])
def test_it_lowers_at_the_size_of_mamba_2_2_7b(implementation, function, monkeypatch):
    monkeypatch.undo()
    platform = CUDA[PLATFORM[implementation]]
    call = functools.partial(function, implementation=implementation)
    text = lowered_text(platform, call, described(shapes.MAMBA2_2_7B))
    assert kernels_in(text) == {implementation}
    # Nothing as large as the decays or the scores of all pairs is ever in main memory; the states
    # at the borders are the largest.
    B, T, N, P, _, M = shapes.MAMBA2_2_7B
    borders = B * N * P * M * (T // shapes.CHUNK[PLATFORM[implementation]])
    sizes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    assert max(np.prod([int(n) for n in size[:-1].split("x")]) for size in sizes) <= borders


@pytest.mark.parametrize(
    ("platform", "chosen"), [("tpu", "pallas_tpu"), ("gpu", "pallas_mosaic_gpu")]
)
def test_the_default_is_the_kernel_where_there_is_one(platform, chosen, monkeypatch):
    monkeypatch.undo()
    text = lowered_text(CUDA[platform], forward, described(shapes.MAMBA2_2_7B))
    assert kernels_in(text) == {chosen}
    decode = shapes.MAMBA2_2_7B._replace(length=1)
    assert not kernels_in(lowered_text(CUDA[platform], forward, described(decode)))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_it_says_why_it_cannot_run(implementation):
    platform = PLATFORM[implementation].upper()
    reason = f"{implementation}: it needs a {platform}; this program is for a CPU"
    with pytest.raises(KernelArgumentError, match=reason):
        ssd(**make(3)[0], implementation=implementation)


@pytest.mark.parametrize(
    ("implementation", "change", "options", "reason"),
    [
        ("pallas_tpu", {}, {"chunk": 100}, "chunk is 100; the kernel takes 128 or 256"),
        ("pallas_tpu", {"states": 4096}, {}, "a head's state is 64 x 4096; the kernel holds"),
        ("pallas_mosaic_gpu", {}, {"chunk": 32}, "chunk is 32; the kernel takes 64"),
        ("pallas_mosaic_gpu", {"channels": 48}, {}, "P is 48 and M is 128; the kernel takes mult"),
        ("pallas_triton", {}, {"chunk": 100}, "chunk is 100; the kernel takes 16, 32 or 64"),
        ("pallas_triton", {"states": 512}, {}, "a head's state is 64 x 512; the kernel holds"),
    ],
)
def test_what_a_kernel_cannot_take_goes_to_the_next(
    implementation, change, options, reason, monkeypatch
):
    monkeypatch.undo()
    arguments = described(shapes.MAMBA2_2_7B._replace(**change))
    named = functools.partial(forward, implementation=implementation, **options)
    with assume_platform(PLATFORM[implementation]):
        with pytest.raises(KernelArgumentError, match=f"{implementation}: {reason}"):
            jax.eval_shape(named, arguments)
        jax.eval_shape(functools.partial(forward, **options), arguments)


def test_float32_goes_to_the_kernel_by_triton(monkeypatch):
    monkeypatch.undo()
    arguments = described(shapes.MAMBA2_2_7B, jnp.float32)
    named = functools.partial(forward, implementation="pallas_mosaic_gpu")
    with assume_platform("gpu"):
        with pytest.raises(
            KernelArgumentError, match="x has dtype float32; the kernel takes bfloat16"
        ):
            jax.eval_shape(named, arguments)
    assert kernels_in(lowered_text("cuda", forward, arguments)) == {"pallas_triton"}


if not HAS_GPU_INTERPRETER:  # only lowering can be tried there
    del (
        test_tiles_of_two_chunks_equal_the_reference,
        test_tiles_of_every_length_equal_the_reference,
        test_tiles_without_skip_and_state_and_with_strong_decay,
        test_tiles_never_read_padding_nor_an_unwritten_state,
    )
