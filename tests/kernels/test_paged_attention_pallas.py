"""Paged attention's kernels for accelerators against the equation, without an accelerator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.attention import mosaic_gpu_tiles
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.paged_attention import paged_attention, shapes
from jax.experimental.pallas import mosaic_gpu as plgpu

from .interpreted import HAS_GPU_INTERPRETER, PLATFORM, interpreted, simulated_tpu
from .lowering import kernels_in, lowered_text
from .paged_scene import assert_equal, by_loops, edges, make_scene

BACKENDS = ("pallas_tpu", "pallas_mosaic_gpu", "pallas_triton")
INTERPRETED = [b for b in BACKENDS if b != "pallas_mosaic_gpu" or HAS_GPU_INTERPRETER]
CUDA = {"gpu": "cuda", "tpu": "tpu"}
# Keys of a block of the pool, and of a tile of several blocks.
BLOCK = {"pallas_tpu": 4, "pallas_mosaic_gpu": 32, "pallas_triton": 8}
TOLERANCE = {np.float32: 1e-5, jnp.bfloat16: 2**-6}
DTYPE = {"pallas_tpu": np.float32, "pallas_mosaic_gpu": jnp.bfloat16, "pallas_triton": np.float32}
# Heads, key/value heads, and their width.
SIZES = {"pallas_tpu": (8, 4, 6), "pallas_mosaic_gpu": (2, 1, 64), "pallas_triton": (4, 2, 6)}
RULES = ({}, {"window": 6, "soft_cap": 2.0, "scale": 0.7})


def add_product(total, a, b):
    """What the interpreter cannot do: wgmma with a factor in registers, into a given sum.

    A plain load, unlike wgmma's, has to be fenced off from the copies that come next.
    """
    factor = b[...]
    plgpu.commit_smem()
    return total + jnp.dot(a, factor, preferred_element_type=jnp.float32)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks of rows, groups of heads, and tiles of two blocks, at tiny sizes."""
    monkeypatch.setattr(shapes, "TPU_HEADS", 2)
    monkeypatch.setattr(shapes, "TPU_LANES", 1)
    monkeypatch.setattr(shapes, "TPU_COLUMNS", 2 * 2 * BLOCK["pallas_tpu"])
    monkeypatch.setattr(shapes, "TPU_SCORES", 4 * 2 * 2 * BLOCK["pallas_tpu"])
    monkeypatch.setattr(shapes, "TPU_ROW_UNIT", 4)
    monkeypatch.setattr(shapes, "TPU_PROGRAMS", 1)
    monkeypatch.setattr(shapes, "TRITON_ROWS", 16)
    monkeypatch.setattr(shapes, "TRITON_KEYS", 16)
    monkeypatch.setattr(shapes, "GPU_PROGRAMS", 1)
    monkeypatch.setattr(shapes, "GPU_KEYS", 64)
    monkeypatch.setattr(mosaic_gpu_tiles, "add_product", add_product)


def scene_for(implementation, lengths=None, dtype=None, **options):
    """A scene of sizes that the implementation takes."""
    heads, kv_heads, head_dim = SIZES[implementation]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    block = options.setdefault("block", BLOCK[implementation])
    dtype = dtype or DTYPE[implementation]
    lengths = edges(block) if lengths is None else lengths
    return make_scene(lengths, dtype=dtype, **sizes | options)


def run(scene, implementation, **options):
    call = functools.partial(paged_attention, implementation=implementation, **options)
    with interpreted(implementation):
        return jax.jit(call)(*scene.arguments)


def check(scene, implementation, tolerance=None, **options):
    tolerance = tolerance or TOLERANCE[scene.q.dtype.type]
    assert_equal(run(scene, implementation, **options), by_loops(scene, **options), tolerance)


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize(("queries", "rule"), [(1, RULES[0]), (3, RULES[1])])
def test_it_is_the_equation(implementation, queries, rule):
    check(scene_for(implementation, queries=queries, shared=1), implementation, **rule)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("times", [0.5, 1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_every_length_and_size(implementation, queries, times, rule):
    """Blocks smaller than a tile, as large, and (where there are such tiles) larger."""
    block = int(times * BLOCK[implementation])
    for dtype in {DTYPE[implementation], jnp.bfloat16}:
        scene = scene_for(implementation, queries=queries, shared=1, block=block, dtype=dtype)
        check(scene, implementation, **rule)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_chunk_may_have_several_tiles_of_rows(implementation):
    check(scene_for(implementation, (70, 33), queries=40), implementation, window=20)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 1, 7), (6, 6, 5), (9, 3, 130)])
@pytest.mark.parametrize("block", [1, 5, 48])
def test_triton_takes_any_size(sizes, block):
    sizes = dict(zip(("heads", "kv_heads", "head_dim"), sizes, strict=True))
    lengths = [max(n, 0) for n in edges(block)]
    check(scene_for("pallas_triton", lengths, queries=3, block=block, **sizes), "pallas_triton")


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_the_keys_of_a_row_are_shared_out(implementation, monkeypatch):
    """By each row's own length; some programs get none."""
    # Two programs for each of 3 rows and 2 heads, or groups of heads; Mosaic GPU's scene has one.
    wanted = 6 if implementation == "pallas_mosaic_gpu" else 12
    monkeypatch.setattr(shapes, "TPU_PROGRAMS", wanted)
    monkeypatch.setattr(shapes, "GPU_PROGRAMS", wanted)
    block = BLOCK[implementation]
    scene = scene_for(implementation, (3, 11 * block + 1, 0), shared=0)
    check(scene, implementation)
    call = functools.partial(paged_attention, implementation=implementation)
    with interpreted(implementation):
        assert "f32[6," in str(jax.make_jaxpr(call)(*scene.arguments))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_triton"])
def test_bfloat16_is_summed_in_float32(implementation):
    scene = scene_for(implementation, dtype=jnp.bfloat16)
    out, log_total = run(scene, implementation)
    assert out.dtype == jnp.bfloat16 and log_total.dtype == jnp.float32
    want = by_loops(scene)
    assert_equal((out, log_total), want, 2**-6)
    assert_equal((log_total,), want[1:])


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_rows_begin_anywhere_and_those_without_an_answer_are_nan(implementation):
    block = BLOCK[implementation]
    scene = scene_for(implementation, (block + 3,) * 4, queries=3)
    offsets = np.array([1, block + 2, -2, block], np.int32)
    want = by_loops(scene, offsets=offsets)
    scene.table[3, 1] = -1
    got = [np.asarray(x) for x in run(scene, implementation, offsets=offsets)]
    assert_equal([x[:3] for x in got], [x[:3] for x in want], TOLERANCE[scene.q.dtype.type])
    assert all(np.isnan(x[3]).all() for x in got)
    np.testing.assert_array_equal(got[0][1, 1:], 0)
    np.testing.assert_array_equal(got[0][2, :2], 0)


def test_no_two_accesses_race_in_the_simulated_tpu(capfd, caplog):
    scene = scene_for("pallas_tpu", (0, 9), heads=2, kv_heads=2)
    with simulated_tpu(capfd, caplog):
        got = jax.block_until_ready(paged_attention(*scene.arguments, implementation="pallas_tpu"))
    assert_equal(got, by_loops(scene))


def described(name, dtype=jnp.bfloat16):
    """The arguments of a real model's call, without values."""
    B, T, S, N, K, H, block = shapes.SHAPES[name]
    blocks = -(-S // block)
    pool = jax.ShapeDtypeStruct((B * blocks, block, K, H), dtype)
    table, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((B, blocks), (B,)))
    return jax.ShapeDtypeStruct((B, T, N, H), dtype), pool, pool, table, lengths


REAL = ("7b_decode", "8b_decode", "8b_chunk", "8b_long_decode")


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("name", REAL)
def test_it_lowers_at_the_sizes_of_real_models(implementation, name, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(
        paged_attention, implementation=implementation, window=2048, soft_cap=50.0
    )
    platform = CUDA[PLATFORM[implementation]]
    assert kernels_in(lowered_text(platform, call, *described(name))) == {implementation}


@pytest.mark.parametrize(
    ("platform", "dtype", "chosen"),
    [
        ("tpu", jnp.bfloat16, "pallas_tpu"),
        ("tpu", jnp.float32, "pallas_tpu"),
        ("cuda", jnp.bfloat16, "pallas_mosaic_gpu"),
        ("cuda", jnp.float32, "pallas_triton"),
    ],
)
def test_the_default_is_the_kernel_where_there_is_one(platform, dtype, chosen, monkeypatch):
    monkeypatch.undo()
    text = lowered_text(platform, paged_attention, *described("8b_decode", dtype))
    assert kernels_in(text) == {chosen}


@pytest.mark.parametrize("implementation", BACKENDS)
def test_it_says_why_it_cannot_run(implementation):
    call = functools.partial(paged_attention, implementation=implementation)
    platform = PLATFORM[implementation]
    reason = f"{implementation}: it needs a {platform.upper()}; this program is for a CPU"
    with pytest.raises(KernelArgumentError, match=reason):
        jax.eval_shape(call, *described("tiny"))
    with assume_platform(platform), pytest.raises(KernelArgumentError, match="q is float16"):
        jax.eval_shape(call, *described("tiny", jnp.float16))


def pools(kv_heads, head_dim, block, dtype=jnp.bfloat16, blocks=4):
    q = jax.ShapeDtypeStruct((1, 1, kv_heads, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((4, block, kv_heads, head_dim), dtype)
    table, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, blocks), (1,)))
    return q, pool, pool, table, lengths


@pytest.mark.parametrize(
    ("implementation", "sizes", "words"),
    [
        ("pallas_tpu", (12, 128, 16), "a pool with 12 heads of 128 would be copied whole"),
        ("pallas_tpu", (8, 64, 16), "a pool with 8 heads of 64 would be copied whole"),
        ("pallas_tpu", (8, 128, 2048), "a block of 2048 keys takes 4194304 bytes; the kernel"),
        ("pallas_mosaic_gpu", (8, 128, 16, jnp.float32), "q is float32; the kernel takes bfloat16"),
        ("pallas_mosaic_gpu", (8, 80, 16), "H is 80; the kernel takes multiples of 64 up to 128"),
        ("pallas_mosaic_gpu", (8, 192, 16), "H is 192; the kernel takes multiples of 64 up to 128"),
        ("pallas_mosaic_gpu", (8, 64, 24), "a block has 24 keys; the kernel takes a multiple of 8"),
        ("pallas_mosaic_gpu", (8, 64, 192), "a block has 192 keys; the kernel takes a multiple"),
        ("pallas_triton", (8, 512, 16), "H is 512; the kernel takes at most 256"),
        ("pallas_tpu", (8, 128, 16, jnp.bfloat16, 2**17), "the table has 131072 entries; the k"),
    ],
)
def test_it_refuses_pools_that_it_cannot_read(implementation, sizes, words, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(paged_attention, implementation=implementation)
    with assume_platform(PLATFORM[implementation]):
        with pytest.raises(KernelArgumentError, match=words):
            jax.eval_shape(call, *pools(*sizes))
        # The default takes them all the same.
        jax.eval_shape(paged_attention, *pools(*sizes))
