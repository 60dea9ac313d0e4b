"""Attention's kernels for accelerators against the reference, without an accelerator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.attention import (
    AttentionMask,
    attention,
    merge_attention,
    mosaic_gpu_tiles,
    shapes,
)
from genlab.kernels.attention.mask import causal_mask, full_mask
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError
from jax.experimental.pallas import mosaic_gpu as plgpu

from .interpreted import PLATFORM, interpreted, simulated_tpu
from .lowering import kernels_in, lowered_text

BACKENDS = ("pallas_tpu", "pallas_mosaic_gpu", "pallas_triton")
# JAX 0.10 has no interpreter of Mosaic GPU kernels.
INTERPRETED = [
    b for b in BACKENDS if b != "pallas_mosaic_gpu" or hasattr(plgpu, "InterpretGPUParams")
]
# wgmma works on 64 rows, a Triton product on 16.
BLOCK = {"pallas_tpu": 8, "pallas_mosaic_gpu": 64, "pallas_triton": 16}
DTYPE = {"pallas_tpu": jnp.float32, "pallas_mosaic_gpu": jnp.bfloat16, "pallas_triton": jnp.float32}
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2**-6}
CUDA = {"gpu": "cuda", "tpu": "tpu"}


def lengths(block):
    return (1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 3 * block + 7)


EVERY_LENGTH = [(b, n) for b in INTERPRETED for n in lengths(BLOCK[b])]


def add_product(total, a, b):
    """What the interpreter cannot do: wgmma with a factor in registers, into a given sum.

    A plain load, unlike wgmma's, has to be fenced off from the copies that come next.
    """
    factor = b[...]
    plgpu.commit_smem()
    return total + jnp.dot(a, factor, preferred_element_type=jnp.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of rows and of keys at tiny sizes."""
    monkeypatch.setattr(shapes, "TPU_ROWS", BLOCK["pallas_tpu"])
    monkeypatch.setattr(shapes, "TPU_KEYS", BLOCK["pallas_tpu"])
    monkeypatch.setattr(shapes, "TPU_ROW_UNIT", 4)
    monkeypatch.setattr(shapes, "TPU_LANES", 4)
    monkeypatch.setattr(shapes, "GPU_KEYS", BLOCK["pallas_mosaic_gpu"])
    monkeypatch.setattr(shapes, "GPU_PROGRAMS", 1)
    monkeypatch.setattr(shapes, "TRITON_ROWS", BLOCK["pallas_triton"])
    monkeypatch.setattr(shapes, "TRITON_KEYS", BLOCK["pallas_triton"])
    monkeypatch.setattr(mosaic_gpu_tiles, "add_product", add_product)


def make(queries, keys, heads=4, kv_heads=2, head_dim=6, batch=2, dtype=np.float32):
    """q, k, v, and weights for the sum that is differentiated."""
    draw = np.random.default_rng(queries)  # NumPy: jax.random would compile for every shape

    def normal(*shape):
        return draw.standard_normal(shape, np.float32)

    q = normal(batch, queries, heads, head_dim).astype(dtype)
    k, v = (normal(batch, keys, kv_heads, head_dim).astype(dtype) for _ in "kv")
    return (q, k, v), (normal(batch, queries, heads, head_dim), normal(batch, queries, heads))


def every_clause(queries, keys, *, tags=True, pinned=True, tree=True, batch=2):
    """Documents, padding, unwritten keys, and every optional clause; some rows see nothing."""
    draw = np.random.default_rng(keys)
    k_order = np.tile(np.arange(keys), (batch, 1))
    k_order[:, keys // 2] = -1
    q_hi = np.tile(np.arange(queries) + keys - queries, (batch, 1))
    q_segment = np.tile(np.arange(queries) * 3 // max(queries, 1), (batch, 1))
    q_segment[:, queries // 2] = -1
    fields = {
        "q_lo": np.maximum(q_hi - 9, -1),
        "q_hi": q_hi,
        "k_order": k_order,
        "q_segment": q_segment,
        "k_segment": np.tile(np.arange(keys) * 3 // keys, (batch, 1)),
        "q_tag": draw.integers(-1, 2, (batch, queries)) if tags else None,
        "k_tag": draw.integers(-1, 2, (batch, keys)) if tags else None,
    }
    fields = {n: None if v is None else v.astype(np.int32) for n, v in fields.items()}
    fields["k_pinned"] = draw.random((batch, keys)) < 0.1 if pinned else None
    fields["tree"] = draw.random((batch, queries, keys)) < 0.7 if tree else None
    return AttentionMask(**fields)


def causal_tail(queries, keys, batch=2):
    """The last queries of a causal sequence."""
    mask = causal_mask(batch, keys)
    last = keys - queries
    return mask._replace(
        q_lo=mask.q_lo[:, last:], q_hi=mask.q_hi[:, last:], q_segment=mask.q_segment[:, last:]
    )


@functools.partial(jax.jit, static_argnames=("implementation", "soft_cap", "scale"))
def everything(arrays, weights, mask, *, implementation, soft_cap=None, scale=None):
    """Both results, and the gradients of a sum that depends on both."""

    def loss(q, k, v):
        out, log_total = attention(
            q, k, v, mask, soft_cap=soft_cap, scale=scale, implementation=implementation
        )
        finite = jnp.where(jnp.isfinite(log_total), log_total, 0.0)
        weighted = jnp.sum(out.astype(jnp.float32) * weights[0]) + jnp.sum(finite * weights[1])
        return weighted, (out, log_total)

    (dq, dk, dv), (out, log_total) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return {"out": out, "log_total": log_total, "dq": dq, "dk": dk, "dv": dv}


def assert_equal(got, want, tolerance=1e-5):
    """Equal within rounding of the largest element of each array."""
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        one, other = (np.asarray(v, np.float32) for v in (got[name], value))
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other), err_msg=name)
        one, other = (np.where(np.isneginf(v), 0, v) for v in (one, other))
        assert np.isfinite(one).all(), name
        limit = tolerance * (1 + np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=name)


def arguments(implementation, queries, keys, **shape):
    """Arguments in a dtype, and a mask with what clauses, that the implementation takes."""
    arrays, weights = make(queries, keys, dtype=DTYPE[implementation], **shape)
    tree = implementation != "pallas_mosaic_gpu"
    return arrays, weights, every_clause(queries, keys, tree=tree)


def check(implementation, arrays, weights, mask, tolerance=None, **options):
    want = everything(arrays, weights, mask, **options, implementation="reference")
    with interpreted(implementation):
        got = everything(arrays, weights, mask, **options, implementation=implementation)
    assert_equal(got, want, tolerance or TOLERANCE[DTYPE[implementation]])
    return got


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "scale": 0.7}])
def test_results_and_gradients_equal_the_reference(implementation, options):
    block = BLOCK[implementation]
    check(implementation, *arguments(implementation, block + 1, 2 * block + 7), **options)


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("mask_of", [causal_tail, lambda t, s: full_mask(2, s)])
def test_blocks_that_need_no_mask_and_those_that_nobody_sees(implementation, mask_of):
    length = 3 * BLOCK[implementation]
    arrays, weights, _ = arguments(implementation, length, length, heads=2, kv_heads=1)
    check(implementation, arrays, weights, mask_of(length, length))


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "length"), EVERY_LENGTH)
@pytest.mark.parametrize("head_dim", [5, 8])
@pytest.mark.parametrize("optional", [True, False])
def test_every_length_and_odd_sizes(implementation, length, head_dim, optional):
    arrays, weights, mask = arguments(implementation, length, length, head_dim=head_dim)
    if not optional:
        mask = mask._replace(q_tag=None, k_tag=None, k_pinned=None, tree=None)
    check(implementation, arrays, weights, mask)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "keys"), EVERY_LENGTH)
@pytest.mark.parametrize("queries", [1, 3, 8])
def test_every_length_of_the_history(implementation, queries, keys):
    check(implementation, *arguments(implementation, queries, keys, heads=2, kv_heads=1))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_triton"])
def test_bfloat16_is_summed_in_float32(implementation):
    block = BLOCK[implementation]
    arrays, weights = make(block + 1, 2 * block + 7, dtype=jnp.bfloat16)
    mask = every_clause(block + 1, 2 * block + 7)
    got = check(implementation, arrays, weights, mask, 2**-6)
    assert got["out"].dtype == jnp.bfloat16 and got["log_total"].dtype == jnp.float32
    exact = [x.astype(np.float32) for x in arrays]
    want = everything(exact, weights, mask, implementation="reference")
    assert_equal({"log_total": got["log_total"]}, {"log_total": want["log_total"]})


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_unwritten_memory_is_never_read(implementation):
    block = BLOCK[implementation]
    few = {"heads": 2, "kv_heads": 1}
    (q, k, v), weights, mask = arguments(implementation, block + 1, 2 * block + 7, **few)
    # A whole block, and parts of others.
    order = np.array(mask.k_order)
    order[1, 3 : block + 5] = -1
    mask = mask._replace(k_order=order)
    unwritten = ~np.asarray(mask.key_is_written())[:, :, None, None]
    want = everything((q, k, v), weights, mask, implementation="reference")
    for junk in (np.nan, np.inf):
        holes = [np.where(unwritten, np.asarray(junk, x.dtype), x) for x in (k, v)]
        with interpreted(implementation):
            got = everything((q, *holes), weights, mask, implementation=implementation)
        assert_equal(got, want, TOLERANCE[DTYPE[implementation]])


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_row_without_keys_gives_zero_whatever_its_cotangent(implementation):
    length = BLOCK[implementation]
    (q, k, v), _, _ = arguments(implementation, length, length, heads=2, kv_heads=1)
    mask = causal_mask(2, length)
    mask = mask._replace(q_segment=mask.q_segment.at[:, 3:].set(7))

    def loss(q, k, v):
        out, log_total = attention(q, k, v, mask, implementation=implementation)
        squares = jnp.sum(jnp.square(out.astype(jnp.float32)))
        return squares + jnp.sum(jnp.exp(log_total)), (out, log_total)

    with interpreted(implementation):
        gradients, (out, log_total) = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(
            q, k, v
        )
    np.testing.assert_array_equal(out[:, 3:], 0)
    np.testing.assert_array_equal(log_total[:, 3:], -np.inf)
    np.testing.assert_array_equal(gradients[0][:, 3:], 0)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)


@pytest.mark.parametrize("implementation", ["pallas_tpu"])
def test_the_gradient_passes_through_a_merge(implementation):
    queries, keys, cut = 3, 16, 8
    (q, k, v), (weight, _) = make(queries, keys, heads=2)
    mask = every_clause(queries, keys, tags=False, tree=False)

    def part(at, q, k, v, name):
        narrowed = mask._replace(
            k_order=mask.k_order[:, at], k_segment=mask.k_segment[:, at],
            k_pinned=mask.k_pinned[:, at],
        )  # fmt: skip
        return attention(q, k[:, at], v[:, at], narrowed, implementation=name)

    def merged(q, k, v):
        parts = [part(at, q, k, v, implementation) for at in (slice(cut), slice(cut, None))]
        return jnp.sum(merge_attention(*parts[0], *parts[1]) * weight)

    def whole(q, k, v):
        return jnp.sum(part(slice(None), q, k, v, "reference")[0] * weight)

    want = jax.jit(jax.grad(whole, argnums=(0, 1, 2)))(q, k, v)
    with interpreted(implementation):
        got = jax.jit(jax.grad(merged, argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_few_queries_on_many_keys_are_cut_and_merged(implementation, monkeypatch):
    monkeypatch.setattr(shapes, "TPU_PROGRAMS", 4)
    monkeypatch.setattr(shapes, "GPU_PROGRAMS", 4)
    keys = 3 * BLOCK[implementation] + 7
    arrays, weights, mask = arguments(implementation, 1, keys, heads=2, kv_heads=1)
    check(implementation, arrays, weights, mask, scale=0.9)
    # One block of queries for each of 2 rows: the 4 blocks of keys are cut into 2 parts.
    with interpreted(implementation):
        jaxpr = str(
            jax.make_jaxpr(lambda *a: attention(*a, implementation=implementation))(*arrays, mask)
        )
    assert "f32[4," in jaxpr


def test_no_two_accesses_race_in_the_simulated_tpu(capfd, caplog):
    arrays, weights, mask = arguments("pallas_tpu", 9, 9)
    want = everything(arrays, weights, mask, implementation="reference")
    with simulated_tpu(capfd, caplog):
        got = everything(arrays, weights, mask, implementation="pallas_tpu")
        jax.block_until_ready(got)
    assert_equal(got, want)


def described(name, dtype=jnp.bfloat16, optional=False):
    """q, k, v and the mask of a real model's call, without values."""
    B, T, S, N, K, H = shapes.SHAPES[name]
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in ((B, T, N, H), (B, S, K, H), (B, S, K, H))]
    by_query, by_key = (jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (T, S))
    mask = AttentionMask(by_query, by_query, by_key, by_query, by_key)
    if optional:
        pinned, tree = (jax.ShapeDtypeStruct(s, jnp.bool_) for s in ((B, S), (B, T, S)))
        mask = mask._replace(q_tag=by_query, k_tag=by_key, k_pinned=pinned, tree=tree)
    return (*arrays, mask)


def forward(q, k, v, mask, implementation=None):
    return attention(q, k, v, mask, implementation=implementation)


def backward(q, k, v, mask, implementation=None):
    def loss(q, k, v):
        out, log_total = forward(q, k, v, mask, implementation)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(log_total)

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("function", [forward, backward])
def test_it_lowers_at_the_size_of_a_7b_model(implementation, function, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(function, implementation=implementation)
    platform = CUDA[PLATFORM[implementation]]
    assert kernels_in(lowered_text(platform, call, *described("7b_prefill"))) == {implementation}


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("name", ["8b_decode", "quick", "tiny"])
def test_it_lowers_at_other_sizes(implementation, name, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(backward, implementation=implementation)
    platform = CUDA[PLATFORM[implementation]]
    dtype = jnp.bfloat16 if implementation == "pallas_mosaic_gpu" else jnp.float32
    text = lowered_text(platform, call, *described(name, dtype))
    assert kernels_in(text) == {implementation}


@pytest.mark.parametrize(
    ("platform", "chosen"), [("tpu", "pallas_tpu"), ("gpu", "pallas_mosaic_gpu")]
)
def test_the_default_is_the_kernel_where_there_is_one(platform, chosen, monkeypatch):
    monkeypatch.undo()
    for name in ("7b_prefill", "8b_decode"):
        assert kernels_in(lowered_text(CUDA[platform], forward, *described(name))) == {chosen}


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_triton"])
def test_every_clause_lowers(implementation, monkeypatch):
    monkeypatch.undo()
    call = functools.partial(backward, implementation=implementation)
    platform = CUDA[PLATFORM[implementation]]
    text = lowered_text(platform, call, *described("134m_train", optional=True))
    assert kernels_in(text) == {implementation}


def test_a_gpu_takes_what_the_first_choice_cannot(monkeypatch):
    monkeypatch.undo()
    for dtype, optional in ((jnp.float32, False), (jnp.bfloat16, True)):
        text = lowered_text("cuda", forward, *described("134m_train", dtype, optional))
        assert kernels_in(text) == {"pallas_triton"}


@pytest.mark.parametrize("implementation", BACKENDS)
def test_it_says_why_it_cannot_run(implementation):
    call = functools.partial(forward, implementation=implementation)
    platform = PLATFORM[implementation]
    arrays = described("tiny")
    reason = f"{implementation}: it needs a {platform.upper()}; this program is for a CPU"
    with pytest.raises(KernelArgumentError, match=reason):
        jax.eval_shape(call, *arrays)
    with assume_platform(platform):
        with pytest.raises(KernelArgumentError, match="q is float16"):
            jax.eval_shape(call, *described("tiny", jnp.float16))
        if platform == "tpu":
            return
        wide = [jax.ShapeDtypeStruct((*x.shape[:3], 192), x.dtype) for x in arrays[:3]]
        with pytest.raises(KernelArgumentError, match="H is 192; the kernel takes at most 128"):
            jax.eval_shape(call, *wide, arrays[3])


def test_the_mosaic_gpu_kernel_takes_no_tree():
    call = functools.partial(forward, implementation="pallas_mosaic_gpu")
    with assume_platform("gpu"), pytest.raises(KernelArgumentError, match="the mask has a tree"):
        jax.eval_shape(call, *described("tiny", optional=True))
