"""Imported checkpoints compute what transformers computes with them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.context import Context
from genlab.paradigms.masks import Causal, Full

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
CAUSAL = sorted(
    path.name for path in FIXTURES.iterdir() if "greedy" in np.load(path / "expected.npz").files
)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NEAR = 1e-4  # of two logits between which rounding may choose


@jax.jit
def whole(model, tokens, valid, mask):
    out, _ = model(tokens, ctx=Context(valid=valid, mask=mask))
    return model.head(out.hidden)


@jax.jit
def grow(model, state, tokens):
    out, state = model(tokens, state)
    return model.head(out.hidden), state


@pytest.mark.parametrize("name", NAMES)
def test_logits(imported, expected, name):
    model, want = imported(name).model.prepare("float32"), expected(name)
    tokens = jnp.asarray(want["tokens"])
    mask = Causal() if imported(name).config.paradigm.name == "autoregressive" else Full()
    logits = whole(model, tokens, jnp.ones_like(tokens, bool), mask)
    np.testing.assert_allclose(logits, want["logits"], **TOLERANCE)

    padded = whole(model, jnp.asarray(want["padded"]), jnp.asarray(want["valid"]), mask)
    real = want["valid"]
    np.testing.assert_allclose(
        np.asarray(padded)[real], want["padded_logits"][real], **TOLERANCE
    )


@pytest.mark.parametrize("name", CAUSAL)
def test_cached_decoding(imported, expected, name):
    """Greedy tokens are those of `generate`, except where two logits are equal but for rounding."""
    model, want = imported(name).model.prepare("float32"), expected(name)
    batch, length = want["tokens"].shape
    new = want["greedy"].shape[1]
    state = model.init_state(batch, length + new)
    logits, state = grow(model, state, jnp.asarray(want["tokens"]))
    if "dynamic" not in str(model.config.canonical_json):
        np.testing.assert_allclose(logits, want["logits"], **TOLERANCE)
    for at in range(new):
        last = np.asarray(logits[:, -1])
        chosen, theirs = last.argmax(axis=1), want["greedy"][:, at]
        for row in range(batch):
            gap = last[row, chosen[row]] - last[row, theirs[row]]
            assert gap < NEAR, (at, row, chosen[row], theirs[row])
        logits, state = grow(model, state, jnp.asarray(theirs)[:, None])
