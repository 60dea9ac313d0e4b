"""Paged attention: the reference by loops, XLA's form by the reference, and writing into pools."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.attention import attention
from genlab.kernels.attention.mask import causal_mask
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.paged_attention import paged_attention, shapes, write
from genlab.kernels.paged_attention.api import IMPLEMENTATIONS, PREFERRED

from .paged_scene import assert_equal, by_loops, edges, make_scene

BLOCK = 4
ON_CPU = [name for name in IMPLEMENTATIONS if name in ("reference", *PREFERRED["cpu"])]
RULES = ({}, {"window": 5, "soft_cap": 2.0, "scale": 0.7}, {"window": 1})


@functools.partial(jax.jit, static_argnames=("implementation", "window", "soft_cap", "scale"))
def run(*arguments, **options):
    return paged_attention(*arguments, **options)


@pytest.fixture
def many_steps(monkeypatch):
    """XLA's form takes two blocks at a time."""
    monkeypatch.setattr(shapes, "XLA_BYTES", 2 * 9 * 4 * BLOCK * 2 * 6)
    run.clear_cache()
    yield
    run.clear_cache()


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("queries", [1, 3])
def test_it_is_the_equation(implementation, queries):
    scene = make_scene(edges(BLOCK), queries=queries, shared=1)
    for rule in RULES:
        got = run(*scene.arguments, implementation=implementation, **rule)
        assert_equal(got, by_loops(scene, **rule))


@pytest.mark.parametrize("rule", RULES[:2])
def test_steps_join_to_the_same_result(many_steps, rule):
    scene = make_scene(edges(BLOCK), queries=3)
    jaxpr = jax.make_jaxpr(functools.partial(run, **rule, implementation="xla"))(*scene.arguments)
    assert "while" in str(jaxpr)
    assert_equal(run(*scene.arguments, **rule), by_loops(scene, **rule))


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("heads", [(4, 4, 5), (6, 2, 8), (5, 1, 3)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_every_length_and_size(queries, block, heads, dtype):
    many = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    lengths = [max(n, 0) for n in edges(block)]
    scene = make_scene(lengths, queries=queries, block=block, shared=1, dtype=dtype, **many)
    for rule in RULES:
        want = by_loops(scene, **rule)
        for name in ON_CPU:
            got = run(*scene.arguments, implementation=name, **rule)
            assert_equal(got, want, 1e-5 if dtype == np.float32 else 2**-6)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_rows_may_begin_anywhere_and_padding_sees_nothing(implementation):
    scene = make_scene((7, 7, 7, 7, 0), queries=3)
    offsets = np.array([4, 6, 0, -2, 0], np.int32)
    got = run(*scene.arguments, offsets=offsets, implementation=implementation)
    assert_equal(got, by_loops(scene, offsets=offsets))
    out, log_total = (np.asarray(x) for x in got)
    for row, padding in ((1, slice(1, 3)), (3, slice(0, 2)), (4, slice(None))):
        np.testing.assert_array_equal(out[row, padding], 0)
        np.testing.assert_array_equal(log_total[row, padding], -np.inf)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_it_equals_attention_over_keys_in_one_piece(implementation):
    queries, length = 3, 11
    scene = make_scene((length,) * 2, queries=queries)
    mask = causal_mask(2, length)
    first = length - queries
    mask = mask._replace(
        q_lo=mask.q_lo[:, first:], q_hi=mask.q_hi[:, first:], q_segment=mask.q_segment[:, first:]
    )
    in_one_piece = jax.jit(functools.partial(attention, soft_cap=3.0))
    want = in_one_piece(scene.q, scene.k[:, :length], scene.v[:, :length], mask)
    assert_equal(run(*scene.arguments, soft_cap=3.0, implementation=implementation), want)


def test_bfloat16_is_summed_in_float32():
    scene = make_scene(edges(BLOCK), dtype=jnp.bfloat16)
    out, log_total = run(*scene.arguments)
    assert out.dtype == jnp.bfloat16 and log_total.dtype == jnp.float32
    assert_equal((out, log_total), by_loops(scene), 2**-6)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_rows_that_cannot_be_answered_are_nan_and_their_mates_are_not(implementation):
    scene = make_scene((7, 7, 7, 7, 7))
    table, lengths = scene.table.copy(), scene.lengths.copy()
    table[0, 1] = -1
    table[1, 0] = len(scene.k_pool)
    lengths[2] = table.shape[1] * BLOCK + 1
    lengths[3] = -1
    arguments = (*scene.arguments[:3], table, lengths)
    got = run(*arguments, implementation=implementation)
    for x in got:
        assert np.isnan(np.asarray(x)[:4]).all()
    assert_equal([x[4:] for x in got], [x[4:] for x in by_loops(scene)])
    # A window that leaves a block behind takes its entry out of use.
    got = run(*arguments, window=2, implementation=implementation)
    assert np.isnan(np.asarray(got[0]))[:, 0, 0, 0].tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("implementation", ON_CPU)
def test_nothing_to_see_gives_zeros(implementation):
    scene = make_scene((0, 0), block=2)
    assert np.isnan(scene.k_pool).all()
    for blocks, columns in ((None, None), (0, None), (None, 0)):
        pool, table = scene.k_pool[:blocks], scene.table[:, :columns]
        got = run(scene.q, pool, pool, table, scene.lengths, implementation=implementation)
        np.testing.assert_array_equal(got[0], 0)
        np.testing.assert_array_equal(got[1], -np.inf)


def test_a_step_holds_what_it_gathers_and_no_more():
    """A table for 64 Ki keys in a pool of 1 Ki: the gathered rows never lie in memory whole."""
    f32 = jnp.float32
    q, pool = jax.ShapeDtypeStruct((1, 1, 8, 64), f32), jax.ShapeDtypeStruct((16, 64, 8, 64), f32)
    table, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 1024), (1,)))
    compiled = jax.jit(paged_attention).lower(q, pool, pool, table, lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * shapes.XLA_BYTES
    assert 4 * shapes.XLA_BYTES < 2 * 64 * 1024 * 8 * 64 * 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_written_is_found(dtype):
    """Chunk by chunk into a pool of NaN: every place is the scene's, and attention finds it."""
    scene = make_scene(edges(BLOCK), dtype=dtype)
    k_pool, v_pool = (jnp.full(x.shape, jnp.nan, dtype) for x in (scene.k_pool, scene.v_pool))
    chunk = 5
    for start in range(0, scene.k.shape[1], chunk):
        k, v = (np.zeros((len(scene.lengths), chunk, *x.shape[2:]), dtype) for x in (scene.k,) * 2)
        for new, x in ((k, scene.k), (v, scene.v)):
            part = x[:, start : start + chunk]
            new[:, : part.shape[1]] = part
        offsets = np.full(len(scene.lengths), start, np.int32)
        counts = np.clip(scene.lengths - start, 0, chunk)
        k_pool, v_pool = write(k_pool, v_pool, k, v, scene.table, offsets, counts)
    for found, pool in ((k_pool, scene.k_pool), (v_pool, scene.v_pool)):
        np.testing.assert_array_equal(found.astype(jnp.float32), pool.astype(np.float32))
    want = run(*scene.arguments)
    assert_equal(run(scene.q, k_pool, v_pool, scene.table, scene.lengths), want, 0)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_token_without_a_place_moves_nobody_elses(platform):
    pool, block = 3, 2
    new = jnp.ones((5, 1, 1, 1))
    table = np.array([[0, 1], [0, 1], [-1, 1], [pool, 1], [2, 9]], np.int32)
    offsets = np.array([-1, 2 * block, 0, 1, 1], np.int32)  # only the last one has a place
    before = jnp.zeros((pool, block, 1, 1))
    with assume_platform(platform):
        k_pool, v_pool = write(before, before + 0, new, 2 * new, table, offsets)
    want = np.zeros((pool, block, 1, 1))
    want[2, 1] = 1
    np.testing.assert_array_equal(k_pool, want)
    np.testing.assert_array_equal(v_pool, 2 * want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_donated_pool_is_not_copied(dtype):
    pool, new = (jax.ShapeDtypeStruct(s, dtype) for s in ((4096, 16, 2, 8), (2, 3, 2, 8)))
    table, offsets = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 9), (2,)))
    donated = jax.jit(write, donate_argnums=(0, 1))
    memory = donated.lower(pool, pool, new, new, table, offsets).compile().memory_analysis()
    held = 2 * pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < held / 16


def test_it_says_that_there_is_no_gradient():
    scene = make_scene((3, 5))

    def loss(q):
        return jnp.sum(paged_attention(q, *scene.arguments[1:])[0])

    for differentiate in (jax.grad, jax.jacfwd):
        with pytest.raises(KernelArgumentError, match="no implementation has a gradient"):
            jax.jit(differentiate(loss)).trace(scene.q)


ARRAYS = dict(zip(("q", "k_pool", "v_pool", "table", "lengths"), make_scene((3, 5)).arguments,
                  strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": ARRAYS["q"][0]}, "q has shape (1, 4, 6); want [B T N H]"),
        ({"v_pool": ARRAYS["v_pool"][1:]}, "v_pool has shape (4, 4, 2, 6); want (5, 4, 2, 6)"),
        ({"k_pool": ARRAYS["k_pool"][..., 1:]}, "k_pool has shape (5, 4, 2, 5); want (5, 4, 2, 6)"),
        ({"v_pool": ARRAYS["v_pool"].astype(np.float16)}, "v_pool has dtype float16; want float32"),
        ({"q": ARRAYS["q"][:, :, :3]}, "q has 3 heads; want a multiple of the pool's 2"),
        ({"table": ARRAYS["table"][:1]}, "table has shape (1, 3); want (2, 3)"),
        ({"table": ARRAYS["table"] * 1.0}, "table has dtype float64; want integer"),
        ({"lengths": ARRAYS["lengths"][:1]}, "lengths has shape (1,); want (2,)"),
        ({"offsets": ARRAYS["lengths"] * 1.0}, "offsets has dtype float64; want integer"),
        ({"window": 0}, "window is 0; want a whole number from 1 or None"),
        ({"window": 2.0}, "window is 2.0; want"),
        ({"scale": float("nan")}, "scale is nan; want a finite number or None"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; want a number above 0 or None"),
        ({"implementation": "xls"}, "unknown implementation 'xls'; did you mean 'xla'?"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    with pytest.raises(KernelArgumentError, match="paged_attention: " + re.escape(words)):
        paged_attention(**ARRAYS | change)


def test_wrong_writes_are_named():
    pool, new = np.zeros((3, 2, 1, 4), np.float32), np.zeros((2, 5, 1, 4), np.float32)
    right = {"k_pool": pool, "v_pool": pool, "k": new, "v": new,
             "table": np.zeros((2, 3), np.int32), "offsets": np.zeros(2, np.int32)}  # fmt: skip
    for change, words in (
        ({"v": new[:, 1:]}, "v has shape (2, 4, 1, 4); want (2, 5, 1, 4)"),
        ({"k": new[..., 1:]}, "k has shape (2, 5, 1, 3); want (2, 5, 1, 4)"),
        ({"k": new.astype(jnp.bfloat16)}, "k has dtype bfloat16; want float32, that of k_pool"),
        ({"table": right["table"][:1]}, "table has shape (1, 3); want (2, 3)"),
        ({"counts": np.zeros(3, np.int32)}, "counts has shape (3,); want (2,)"),
    ):
        with pytest.raises(KernelArgumentError, match=re.escape(f"paged_attention.write: {words}")):
            write(**right | change)
