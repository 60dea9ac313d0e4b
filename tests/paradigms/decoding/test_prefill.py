"""A prompt taken in pieces gives what the whole one gives: last hidden state and memory."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding import prefill as module
from genlab.paradigms.decoding.prefill import prefill, takes_pieces
from genlab.paradigms.model import build_model

ROPE = {"name": "linear", "factor": 2.0}


def build(**mixers):
    return build_model(
        ModelConfig(
            width=16, vocab_size=37, max_len=40, pattern=tuple(mixers),
            layers={name: {"mixer": mixer} for name, mixer in mixers.items()},
        ),
        seed=1,
    )  # fmt: skip


MAMBA = {"name": "mamba", "state_size": 4}
MAMBA2 = {"name": "mamba2", "state_size": 4, "head_dim": 8}
RING = {"name": "attention", "num_heads": 2, "window": 6}
STACKS = {
    "mamba": {"mamba": MAMBA},
    "mamba2": {"mamba2": MAMBA2},
    "ring": {"ring": RING},
    "all": {"mamba": MAMBA, "ring": RING, "mamba2": MAMBA2},
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("most", [1, 7])
def test_pieces_equal_the_whole(monkeypatch, stack, most):
    model = build(**STACKS[stack])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 37, (4, 17)), jnp.int32)
    lengths = jnp.asarray([17, 1, 8, 12], jnp.int32)

    def run(limit):
        monkeypatch.setattr(module, "MOST", {"cpu": limit})
        quick = {"xla_backend_optimization_level": 0}  # to compile
        call = jax.jit(lambda m, t, n: prefill(m, t, n, 20), compiler_options=quick)
        return call(model, tokens, lengths)

    want, got = run(17), run(most)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_only_what_loses_nothing_is_cut():
    assert takes_pieces(build(mamba=MAMBA, ring=RING))
    assert not takes_pieces(build(mamba=MAMBA, attention={"name": "attention", "num_heads": 2}))
    assert not takes_pieces(build(ring={**RING, "rope_scaling": ROPE}))


@pytest.mark.parametrize(("length", "calls"), [(16, 1), (17, 2), (48, 3), (49, 4)])
def test_pieces_are_even(monkeypatch, length, calls):
    """The number of pieces is the least, and no piece computes on many tokens that are none."""
    monkeypatch.setattr(module, "MOST", {"cpu": 16})
    model, seen = build(mamba=MAMBA), []

    def scan(take, carry, parts):
        seen.append(parts)
        return carry, None

    jax_ = types.SimpleNamespace(lax=types.SimpleNamespace(scan=scan))
    monkeypatch.setattr(module, "jax", jax_)
    prefill(model, jnp.zeros((1, length), jnp.int32), jnp.full((1,), length), length)
    if calls == 1:
        assert not seen
    else:
        ((_, parts),) = seen
        assert parts.shape[0] == calls and 0 <= parts.size - length < calls
