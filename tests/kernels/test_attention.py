"""Attention: the mask rule by brute force, and every implementation against the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.attention import AttentionMask, attention, merge_attention, shapes
from genlab.kernels.attention.api import IMPLEMENTATIONS, PREFERRED
from genlab.kernels.attention.mask import causal_mask
from genlab.kernels.dispatch import KernelArgumentError

B, T, S, N, K, H = 2, 5, 7, 4, 2, 6
# Kernels for accelerators have a module of their own.
ON_CPU = [name for name in IMPLEMENTATIONS if name in ("reference", *PREFERRED["cpu"])]
FAST = ON_CPU[1:]


FORMS = {  # CPU_JOINED_ROWS, MANY_QUERIES
    "heads joined": (10**9, 10**9),
    "heads inwards": (0, 10**9),
    "heads outwards": (0, 1),
}


@pytest.fixture(params=FORMS)
def either_form(request, monkeypatch):
    """The XLA form depends on how many queries and heads there are."""
    joined, many = FORMS[request.param]
    monkeypatch.setattr(shapes, "CPU_JOINED_ROWS", joined)
    monkeypatch.setattr(shapes, "MANY_QUERIES", many)


def inputs(seed=0, dtype=jnp.float32):
    """q, k, v."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def rule(m, b, t, s):
    """Whether query t sees key s, from the words of the rule."""
    order, lo, hi = m.k_order[b, s], m.q_lo[b, t], m.q_hi[b, t]
    if m.q_segment[b, t] < 0:
        return False
    if m.k_pinned is not None and m.k_pinned[b, s]:
        return True
    in_range = lo <= order <= hi and (m.tree is None or m.tree[b, t, s])
    tagged = m.q_tag is not None and m.q_tag[b, t] == m.k_tag[b, s] >= 0
    same = m.q_segment[b, t] == m.k_segment[b, s]
    return bool(same and order >= 0 and (in_range or tagged))


def random_mask(seed, *, tags=False, pinned=False, tree=False):
    """A mask in which every clause decides somewhere; query (0, 2) sees nothing but pinned keys."""
    draw = np.random.default_rng(seed)
    lo = draw.integers(0, 4, (B, T))
    hi = lo + draw.integers(0, 5, (B, T))
    lo[0, 2], hi[0, 2] = 50, 60
    fields = {
        "q_lo": lo,
        "q_hi": hi,
        "k_order": draw.integers(-1, 8, (B, S)),
        "q_segment": draw.choice([-1, 0, 0, 1], (B, T)),
        "k_segment": draw.choice([0, 0, 1], (B, S)),
        "q_tag": draw.integers(-1, 3, (B, T)) if tags else None,
        "k_tag": draw.integers(-1, 3, (B, S)) if tags else None,
    }
    fields = {n: None if v is None else v.astype(np.int32) for n, v in fields.items()}
    fields["k_pinned"] = draw.random((B, S)) < 0.2 if pinned else None
    fields["tree"] = draw.random((B, T, S)) < 0.6 if tree else None
    return AttentionMask(**{n: None if v is None else jnp.asarray(v) for n, v in fields.items()})


CLAUSES = [
    dict(zip(("tags", "pinned", "tree"), on, strict=True))
    for on in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize("clauses", CLAUSES)
def test_the_rule_word_by_word(clauses):
    mask = random_mask(1, **clauses)
    at_host = AttentionMask(*(None if v is None else np.asarray(v) for v in mask))
    want = [[[rule(at_host, b, t, s) for s in range(S)] for t in range(T)] for b in range(B)]
    np.testing.assert_array_equal(mask.dense(), want)
    assert np.any(want) and not np.all(want)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_reference_is_a_softmax_over_the_visible_keys(soft_cap):
    q, k, v = inputs()
    mask = random_mask(2, tags=True, pinned=True)
    out, log_total = attention(q, k, v, mask, soft_cap=soft_cap, implementation="reference")
    out, log_total = np.asarray(out), np.asarray(log_total)
    q64, k64, v64 = (np.asarray(a, np.float64) for a in (q, k, v))
    visible = np.asarray(mask.dense())
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        seen = np.flatnonzero(visible[b, t])
        score = k64[b, seen, n // (N // K)] @ q64[b, t, n] / np.sqrt(H)
        if soft_cap:
            score = soft_cap * np.tanh(score / soft_cap)
        if not len(seen):
            np.testing.assert_array_equal(out[b, t, n], 0)
            assert log_total[b, t, n] == -np.inf
            continue
        weight = np.exp(score)
        np.testing.assert_allclose(log_total[b, t, n], np.log(weight.sum()), rtol=1e-5, atol=1e-5)
        want = weight / weight.sum() @ v64[b, seen, n // (N // K)]
        np.testing.assert_allclose(out[b, t, n], want, rtol=1e-5, atol=1e-6)


def loss_of(implementation, mask, **options):
    """A scalar that depends on the output and on the denominators."""

    def loss(q, k, v):
        out, log_total = attention(q, k, v, mask, implementation=implementation, **options)
        finite = jnp.where(jnp.isfinite(log_total), log_total, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(finite))

    return loss


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"scale": 0.3}])
def test_implementations_equal_the_reference(name, options):
    q, k, v = inputs(3)
    mask = random_mask(4, tags=True, pinned=True, tree=True)
    want = attention(q, k, v, mask, implementation="reference", **options)
    got = attention(q, k, v, mask, implementation=name, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    gradients = [
        jax.jit(jax.grad(loss_of(n, mask, **options), argnums=(0, 1, 2)))(q, k, v)
        for n in (name, "reference")
    ]
    for a, b in zip(*gradients, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("unit", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_some_queries_at_a_time_equal_all_at_once(unit, monkeypatch):
    q, k, v = inputs(11)
    mask = random_mask(12, tags=True, pinned=True, tree=True)
    call = functools.partial(attention, mask=mask, soft_cap=2.0, implementation="xla")
    want = call(q, k, v)
    gradient = jax.grad(loss_of("xla", mask, soft_cap=2.0), argnums=(0, 1, 2))
    want_gradient = gradient(q, k, v)
    monkeypatch.setattr(shapes, "CPU_SCORES_MAX", 0)
    monkeypatch.setattr(shapes, "CPU_SCORES_AT_ONCE", 0)
    monkeypatch.setattr(shapes, "CPU_QUERIES_UNIT", unit)
    assert "scan" in str(jax.make_jaxpr(call)(q, k, v))
    for a, b in zip(call(q, k, v), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    for a, b in zip(gradient(q, k, v), want_gradient, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)
    poisoned = jnp.where(mask.key_is_written()[:, :, None, None], v, jnp.nan)
    np.testing.assert_array_equal(call(q, k, poisoned)[0], call(q, k, v)[0])


def test_scores_that_caches_hold_are_made_in_one_piece():
    def loops(length):
        shape = jax.ShapeDtypeStruct((1, length, 12, 64), jnp.float32)
        masks = jax.eval_shape(lambda: causal_mask(1, length))
        return "scan" in str(jax.make_jaxpr(attention)(shape, shape, shape, masks))

    assert not loops(512) and loops(1024)


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("name", ON_CPU)
def test_unwritten_memory_and_masked_keys_do_nothing(name):
    q, k, v = inputs(5)
    mask = random_mask(6)
    written = np.asarray(mask.key_is_written())
    assert not written.all()
    want = attention(q, k, v, mask, implementation=name)
    for junk in (np.nan, np.inf, 1e4):
        holes = [jnp.where(written[:, :, None, None], a, junk) for a in (k, v)]
        got = attention(q, *holes, mask, implementation=name)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    # A key that is written, but masked, has weight exactly 0 whatever its score.
    causal = causal_mask(B, T)
    loud = k[:, :T].at[:, -1].set(1e4)
    plain = attention(q, k[:, :T], v[:, :T], causal, implementation=name)[0]
    np.testing.assert_array_equal(
        attention(q, loud, v[:, :T], causal, implementation=name)[0][:, :-1], plain[:, :-1]
    )


@pytest.mark.parametrize("long_keys", [1, 10**9], ids=["in pieces", "whole"])
@pytest.mark.parametrize("name", FAST)
def test_bfloat16_accumulates_in_float32(name, long_keys, monkeypatch):
    monkeypatch.setattr(shapes, "CPU_LONG_KEYS", long_keys)
    q, k, v = inputs(7, jnp.bfloat16)
    mask = random_mask(8)
    out, log_total = attention(q, k, v, mask, implementation=name)
    want, _ = attention(q, k, v, mask, implementation="reference")
    assert out.dtype == jnp.bfloat16 and log_total.dtype == jnp.float32
    np.testing.assert_allclose(
        out.astype(jnp.float32), want.astype(jnp.float32), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_two_parts_merge_to_the_whole(dtype):
    q, k, v = inputs(9, dtype)
    mask = random_mask(10)
    cut = 3
    first, second = (
        attention(
            q,
            k[:, at],
            v[:, at],
            mask._replace(k_order=mask.k_order[:, at], k_segment=mask.k_segment[:, at]),
        )
        for at in (slice(None, cut), slice(cut, None))
    )
    merged = merge_attention(*first, *second)
    whole, _ = attention(q, k, v, mask)
    assert merged.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03
    np.testing.assert_allclose(
        merged.astype(jnp.float32), whole.astype(jnp.float32), rtol=tolerance, atol=tolerance
    )
    nothing = jnp.zeros_like(first[0]), jnp.full_like(first[1], -jnp.inf)
    np.testing.assert_array_equal(merge_attention(*nothing, *nothing), 0)
    np.testing.assert_array_equal(merge_attention(*first, *nothing), first[0])


def test_default_is_fast_and_names_are_checked():
    for names in PREFERRED.values():
        assert "reference" not in names and set(names) <= set(IMPLEMENTATIONS)
    q, k, v = inputs()
    mask = random_mask(1)
    with pytest.raises(KernelArgumentError, match="'xla'"):
        attention(q, k, v, mask, implementation="xlaa")
    with pytest.raises(KernelArgumentError, match="do not fit"):
        attention(q, k, v[:, :3], mask)
    with pytest.raises(KernelArgumentError, match="4 query heads are no multiple of 3"):
        attention(q, jnp.zeros((B, S, 3, H)), jnp.zeros((B, S, 3, H)), mask)
    with pytest.raises(KernelArgumentError, match="mask for queries"):
        attention(q[:, :2], k, v, mask)
