"""The grouped matmul's kernels for accelerators against the reference, without an accelerator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.grouped_matmul import grouped_matmul, shapes

from .interpreted import HAS_GPU_INTERPRETER, PLATFORM, interpreted, simulated_tpu
from .lowering import kernels_in, lowered_text

BACKENDS = ("pallas_mosaic_gpu", "pallas_tpu")
QUICK = ("pallas_tpu",)
# Mosaic GPU's kernel takes bfloat16 and whole blocks only, so it has cases of its own.
MOSAIC = "pallas_mosaic_gpu"
BLOCK = 8
ROWS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 7)
D, F = 6, 10
NAN = np.float32(np.nan)
CUDA = {"gpu": "cuda", "tpu": "tpu"}

# Sizes of four groups over 37 rows: borders inside of tiles, several groups in one, padding behind.
SIZES = {
    "uneven": (9, 1, 17, 10),
    "some empty": (0, 20, 0, 17),
    "padding": (3, 0, 8, 5),
    "only padding": (0, 0, 0, 0),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles of rows and several blocks of a matrix in both directions at tiny sizes."""
    monkeypatch.setattr(shapes, "TPU_ROWS", BLOCK)
    monkeypatch.setattr(shapes, "TPU_SHORTEST", 1)
    monkeypatch.setattr(shapes, "TPU_LANES", 1)
    monkeypatch.setattr(shapes, "TPU_WIDTH", 5)
    monkeypatch.setattr(shapes, "TPU_BLOCK_BYTES", 5 * 3 * 4)


def make(rows, groups=4, dtype=np.float32, weight_dtype=None, inner=D, outer=F):
    """Random rows, one matrix per group, and a cotangent."""
    rng = np.random.default_rng(rows)  # NumPy: a jax.random call would compile for every shape
    x = rng.standard_normal((rows, inner), np.float32).astype(dtype)
    w = rng.standard_normal((groups, inner, outer), np.float32).astype(weight_dtype or dtype)
    return x, tuple(w), rng.standard_normal((rows, outer), np.float32)


def split(rows, groups=4):
    """Sizes that leave one row for no group where there are enough."""
    sizes = np.bincount(np.arange(max(rows - 1, 1)) * 7 % groups, minlength=groups)
    return tuple(int(n) for n in sizes)


@functools.partial(jax.jit, static_argnames="implementation")
def everything(x, w, dy, sizes, *, implementation):
    """y and the gradients of its weighted sum."""

    def loss(x, w):
        y = grouped_matmul(x, w, sizes, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) * dy), y

    (dx, dw), y = jax.grad(loss, (0, 1), has_aux=True)(x, w)
    return {"y": y, "x": dx, "w": dw}


def assert_equal(got, want, rtol=1e-5):
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, one), other in zip(paths, jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype, path
        one, other = (np.asarray(v, np.float32) for v in (one, other))
        limit = rtol * (1 + np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=str(path))


def check(implementation, x, w, dy, sizes, rtol=1e-5):
    sizes = np.array(sizes, np.int32)
    want = everything(x, w, dy, sizes, implementation="reference")
    with interpreted(implementation):
        got = everything(x, w, dy, sizes, implementation=implementation)
    assert_equal(got, want, rtol)


@pytest.mark.parametrize("implementation", QUICK)
@pytest.mark.parametrize("case", SIZES)
def test_results_and_gradients_equal_the_reference(implementation, case):
    check(implementation, *make(37), SIZES[case])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", QUICK)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 4])
def test_every_number_of_rows(implementation, rows, groups):
    check(implementation, *make(rows, groups), split(rows, groups))


@pytest.mark.parametrize("implementation", QUICK)
@pytest.mark.parametrize("weight_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_is_summed_in_float32(implementation, weight_dtype):
    check(
        implementation, *make(19, dtype=jnp.bfloat16, weight_dtype=weight_dtype), split(19), 2**-7
    )


@pytest.mark.parametrize("implementation", QUICK)
def test_what_no_group_asks_for_is_never_read(implementation):
    sizes = np.array(SIZES["padding"], np.int32)
    x, w, dy = make(37)
    want = everything(x, w, dy, sizes, implementation="reference")
    poisoned, poisoned_dy = x.copy(), dy.copy()
    poisoned[sizes.sum() :], poisoned_dy[sizes.sum() :] = NAN, NAN
    unread = (w[0], np.full_like(w[1], NAN), *w[2:])
    with interpreted(implementation):
        got = everything(poisoned, unread, poisoned_dy, sizes, implementation=implementation)
    assert_equal(got, want)


def check_tiles(rows, sizes):
    """In bfloat16, which the results are rounded to."""
    arguments = make(rows, len(sizes), jnp.bfloat16, inner=128, outer=256)
    check(MOSAIC, *arguments, sizes, rtol=2**-7)


def test_tiles_of_several_groups_equal_the_reference():
    check_tiles(100, (9, 0, 70, 10))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 199])
@pytest.mark.parametrize("groups", [1, 4])
def test_tiles_of_every_number_of_rows(rows, groups):
    check_tiles(rows, split(rows, groups))


@pytest.mark.slow
def test_tiles_never_read_what_no_group_asks_for():
    sizes = np.array([70, 0, 9], np.int32)
    x, w, dy = make(100, 3, jnp.bfloat16, inner=128, outer=128)
    want = everything(x, w, dy, sizes, implementation="reference")
    poisoned, poisoned_dy = x.copy(), dy.copy()
    poisoned[sizes.sum() :], poisoned_dy[sizes.sum() :] = NAN, NAN
    unread = (w[0], np.full_like(w[1], NAN), w[2])
    with interpreted(MOSAIC):
        got = everything(poisoned, unread, poisoned_dy, sizes, implementation=MOSAIC)
    assert_equal(got, want, rtol=2**-7)


def test_no_two_accesses_race_in_the_simulated_tpu(capfd, caplog):
    x, w, dy = make(BLOCK + 1, groups=2)
    sizes = np.array(split(BLOCK + 1, groups=2), np.int32)
    want = everything(x, w, dy, sizes, implementation="reference")
    with simulated_tpu(capfd, caplog):
        got = everything(x, w, dy, sizes, implementation="pallas_tpu")
        jax.block_until_ready(got)
    assert_equal(got, want)


def described(shape, dtype=jnp.bfloat16):
    """Arguments of a real model's call, without values."""
    matrices = tuple(
        jax.ShapeDtypeStruct((shape.inner, shape.outer), dtype) for _ in range(shape.groups)
    )
    x = jax.ShapeDtypeStruct((shape.rows, shape.inner), dtype)
    return x, matrices, jax.ShapeDtypeStruct((shape.groups,), jnp.int32)


def forward(x, w, sizes, implementation=None):
    return grouped_matmul(x, w, sizes, implementation=implementation)


def backward(x, w, sizes, implementation=None):
    def loss(x, w):
        return jnp.sum(forward(x, w, sizes, implementation).astype(jnp.float32))

    return jax.grad(loss, (0, 1))(x, w)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("function", [forward, backward])
@pytest.mark.parametrize("shape", [shapes.MIXTRAL_8X7B, shapes.MOE_134M_DECODE])
def test_it_lowers_at_the_size_of_real_models(implementation, function, shape, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(function, implementation=implementation)
    text = lowered_text(CUDA[PLATFORM[implementation]], call, *described(shape))
    assert kernels_in(text) == {implementation}
    if function is forward:  # no copy of all the matrices
        assert f"tensor<{shape.groups}x{shape.inner}x{shape.outer}x" not in text


@pytest.mark.parametrize(
    ("platform", "chosen"), [("tpu", "pallas_tpu"), ("gpu", "pallas_mosaic_gpu")]
)
def test_the_default_is_the_kernel_where_there_is_one(platform, chosen, monkeypatch):
    monkeypatch.undo()
    text = lowered_text(CUDA[platform], forward, *described(shapes.MIXTRAL_8X7B))
    assert kernels_in(text) == {chosen}


@pytest.mark.parametrize("implementation", BACKENDS)
def test_it_says_why_it_cannot_run(implementation, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(forward, implementation=implementation)
    given = described(shapes.GroupedMatmulShape(rows=3, groups=2, inner=128, outer=96))
    platform = PLATFORM[implementation]
    reason = f"{implementation}: it needs a {platform.upper()}; this program is for a CPU"
    with pytest.raises(KernelArgumentError, match=reason):
        jax.eval_shape(call, *given)
    with assume_platform(platform):
        with pytest.raises(KernelArgumentError, match="F is 96; the kernel takes multiples of 128"):
            jax.eval_shape(call, *given)
        jax.eval_shape(forward, *given)


def test_dtypes_that_a_kernel_cannot_take_are_named():
    x, _, sizes = described(shapes.GroupedMatmulShape(rows=3, groups=2, inner=128, outer=128))
    low, high = (jax.ShapeDtypeStruct((128, 128), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    for platform, name, reason in (
        ("gpu", "pallas_mosaic_gpu", r"w\[1\] has dtype float32; the kernel takes bfloat16"),
        ("tpu", "pallas_tpu", r"w\[1\] has dtype float32, w\[0\] bfloat16; they have to agree"),
    ):
        call = functools.partial(forward, implementation=name)
        with assume_platform(platform), pytest.raises(KernelArgumentError, match=reason):
            jax.eval_shape(call, x, (low, high), sizes)


if not HAS_GPU_INTERPRETER:  # only lowering can be tried there
    del (
        test_tiles_of_several_groups_equal_the_reference,
        test_tiles_of_every_number_of_rows,
        test_tiles_never_read_what_no_group_asks_for,
    )
