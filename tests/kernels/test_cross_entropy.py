"""Cross-entropy: every implementation against the reference, that against NumPy, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.cross_entropy import (
    IMPLEMENTATIONS,
    cross_entropy,
    shapes,
    weighted_cross_entropy,
    xla,
)
from genlab.kernels.dispatch import KernelArgumentError

FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})
WIDTH, VOCAB = shapes.TINY.width, shapes.TINY.vocab
BLOCK = 4  # tokens, in these tests


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setitem(shapes.BLOCK_BYTES, "cpu", BLOCK * 4 * VOCAB)
    yield
    run.clear_cache()
    gradients.clear_cache()
    weighted.clear_cache()


def make(tokens, dtype=np.float32, vocab_first=False, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, WIDTH), np.float32)
    weight = rng.standard_normal((VOCAB, WIDTH), np.float32)
    weight = weight if vocab_first else np.ascontiguousarray(weight.T)
    return {
        "hidden": jnp.asarray(hidden, dtype),
        "weight": jnp.asarray(weight, dtype),
        "targets": jnp.asarray(rng.integers(0, VOCAB - 3, tokens), jnp.int32),
    }


def allowed():
    return jnp.arange(VOCAB) < VOCAB - 3


@functools.partial(jax.jit, static_argnames=("vocab_first", "implementation"))
def run(a, allowed, *, vocab_first=False, implementation):
    return cross_entropy(
        a["hidden"], a["weight"], a["targets"], allowed=allowed, vocab_first=vocab_first,
        implementation=implementation,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("vocab_first", "implementation"))
def gradients(a, allowed, cotangents, *, vocab_first=False, implementation):
    def loss(hidden, weight):
        b = a | {"hidden": hidden, "weight": weight}
        nll, log_total = run(b, allowed, vocab_first=vocab_first, implementation=implementation)
        return jnp.sum(nll * cotangents[0] + log_total * cotangents[1])

    return jax.grad(loss, (0, 1))(a["hidden"], a["weight"])


@functools.partial(jax.jit, static_argnames=("vocab_first", "implementation"))
def weighted(a, allowed, token_weight, factor, *, vocab_first=False, implementation):
    def loss(hidden, weight):
        return factor * weighted_cross_entropy(
            hidden, weight, a["targets"], token_weight, allowed=allowed,
            vocab_first=vocab_first, implementation=implementation,
        )  # fmt: skip

    return jax.value_and_grad(loss, (0, 1))(a["hidden"], a["weight"])


def assert_close(got, want, rtol=1e-5, atol=1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def test_reference_is_the_equation():
    a = make(5)
    logits = np.asarray(a["hidden"], np.float64) @ np.asarray(a["weight"], np.float64)
    logits = logits[:, : VOCAB - 3]
    log_total = np.log(np.exp(logits).sum(1))
    nll = log_total - logits[np.arange(5), np.asarray(a["targets"])]
    assert_close(run(a, allowed(), implementation="reference"), (nll, log_total))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1])
def test_values_and_gradients(implementation, tokens):
    a, mask = make(tokens), allowed()
    want = run(a, mask, implementation="reference")
    assert_close(run(a, mask, implementation=implementation), want)
    cotangents = np.random.default_rng(3).standard_normal((2, tokens), np.float32)
    want = gradients(a, mask, cotangents, implementation="reference")
    got = gradients(a, mask, cotangents, implementation=implementation)
    assert_close(got, want)
    assert not np.asarray(got[1])[:, -3:].any()  # what has no probability learns nothing


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("vocab_first", [False, True])
def test_weighted_sum_and_its_gradients(implementation, vocab_first):
    a = make(11, vocab_first=vocab_first)
    token_weight = np.random.default_rng(4).random(11, np.float32)
    token_weight[[2, 7]] = 0.0
    for mask in (None, allowed()):
        arguments = (a, mask, token_weight, 0.3)
        want = weighted(*arguments, vocab_first=vocab_first, implementation="reference")
        got = weighted(*arguments, vocab_first=vocab_first, implementation=implementation)
        assert_close(got, want)


@pytest.mark.parametrize("implementation", FAST)
def test_tokens_without_weight_may_hold_anything(implementation):
    a = make(6)
    token_weight = np.array([1, 0, 1, 1, 0, 1], np.float32)
    wild = a | {"targets": a["targets"].at[jnp.array([1, 4])].set(-1)}
    want = weighted(a, None, token_weight, 1.0, implementation=implementation)
    got = weighted(wild, None, token_weight, 1.0, implementation=implementation)
    assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", FAST)
def test_bfloat16_sums_in_float32(implementation):
    a = make(9, jnp.bfloat16)
    wide = {k: v.astype(jnp.float32) if k != "targets" else v for k, v in a.items()}
    got, want = (
        run(b, None, implementation=i) for b, i in ((a, implementation), (wide, "reference"))
    )
    assert got[0].dtype == got[1].dtype == jnp.float32
    assert_close(got, want)
    token_weight = np.ones(9, np.float32)
    _, got = weighted(a, None, token_weight, 1.0, implementation=implementation)
    _, want = weighted(wide, None, token_weight, 1.0, implementation="reference")
    assert {v.dtype for v in got} == {jnp.bfloat16.dtype}
    assert_close(got, want, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("implementation", FAST)
def test_large_logits_neither_overflow_nor_vanish(implementation):
    a = make(5)
    a["hidden"] *= 1e4
    assert_close(
        run(a, None, implementation=implementation),
        run(a, None, implementation="reference"),
        rtol=1e-5, atol=1e-2,
    )  # fmt: skip


def test_few_logits_are_kept_and_many_go_by_blocks():
    def text(tokens):
        a = make(tokens)
        return str(jax.make_jaxpr(lambda a: run(a, None, implementation=None))(a))

    assert "scan[" not in text(BLOCK)
    assert "scan[" in text(BLOCK + 1)


@pytest.mark.parametrize("form", ["tokens", "weighted"])
def test_memory_of_training_does_not_grow_with_the_tokens(form, monkeypatch):
    """At a vocabulary of 32,000: the weight's gradient in float32 and at most three blocks."""
    width, vocab, tokens = 64, 32000, 2048
    limit = 16 * 2**20
    monkeypatch.setitem(shapes.BLOCK_BYTES, "cpu", limit)
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    weight = jax.ShapeDtypeStruct((width, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(hidden, weight, targets, implementation):
        if form == "tokens":
            nll, _ = cross_entropy(hidden, weight, targets, implementation=implementation)
            return jnp.sum(nll)
        ones = jnp.ones(tokens, jnp.float32)
        return weighted_cross_entropy(hidden, weight, targets, ones, implementation=implementation)

    def temporary(implementation):
        f = jax.jit(jax.grad(functools.partial(loss, implementation=implementation), (0, 1)))
        return f.lower(hidden, weight, targets).compile().memory_analysis().temp_size_in_bytes

    inputs = 4 * (tokens * width + width * vocab)
    assert xla.tokens_per_block(tokens, vocab) < tokens / 10
    assert temporary("xla_blocks") <= 2 * inputs + 3 * limit
    assert temporary("xla") > 4 * tokens * vocab  # what the blocks spare


def test_wrong_arguments_are_named():
    a = make(4)
    hidden, weight, targets = a["hidden"], a["weight"], a["targets"]
    for call, words in (
        (lambda: cross_entropy(hidden[0], weight, targets), "hidden"),
        (lambda: cross_entropy(hidden, weight.T, targets), "weight"),
        (lambda: cross_entropy(hidden, weight.astype(jnp.bfloat16), targets), "weight has dtype"),
        (lambda: cross_entropy(hidden, weight, targets[:3]), "targets"),
        (lambda: cross_entropy(hidden, weight, targets, allowed=jnp.ones(3, bool)), "allowed"),
        (lambda: weighted_cross_entropy(hidden, weight, targets, targets), "token_weight"),
        (lambda: cross_entropy(hidden, weight, targets, implementation="xla_block"), "xla_blocks"),
    ):
        with pytest.raises(KernelArgumentError, match=words):
            call()
