"""Every causal model is decoded through its state as one full forward pass would have it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.decoding.loop import advance
from genlab.paradigms.decoding.plain import Plain
from genlab.paradigms.decoding.sampling import make_sampling

BATCH, WIDTH, LENGTH, MAX_NEW = 4, 8, 24, 16
PLAIN = Plain()

# Prompts of 8, 5, 3 and 1 tokens: as they are, padded left, with holes, padded right.
VALID = np.array(
    [[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 0, 1, 0], [1] + [0] * 7], bool
)


def begin(lab, entry, rows=range(BATCH), *, tokens=None, **values):
    """Starts the prompts `rows`; row r keeps the seed r."""
    rows = list(rows)
    tokens = np.asarray(lab.random_tokens(3, BATCH, WIDTH)) if tokens is None else tokens
    return PLAIN.start(
        entry.model,
        tokens[rows],
        valid=VALID[rows],
        sampling=make_sampling(len(rows), vocab_size=lab.VOCAB, **values),
        seeds=np.array(rows),
        max_new=np.array([MAX_NEW, 9, MAX_NEW, 12])[rows],
        max_len=LENGTH,
    )


def bits(state):
    """All leaves as NumPy arrays, keys as their bits."""
    return jax.tree.map(
        lambda x: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        state,
    )


@pytest.fixture(scope="module")
def sampled(lab):
    """Each model's finished state at temperature 1, all rows together, made once."""

    @functools.cache
    def of(entry):
        return bits(advance(entry.model, PLAIN, begin(lab, entry), 1000))

    return of


def test_greedy_ids_are_those_of_the_full_forward_pass(lab, comparator, causal_entry):
    state = advance(
        causal_entry.model, PLAIN, begin(lab, causal_entry, temperature=0.0), 1000
    )
    assert np.asarray(state.done).all() and (np.asarray(state.failed_at) < 0).all()
    tokens = np.asarray(state.tokens)
    hidden = lab.run(causal_entry.model, jnp.asarray(tokens))[0].hidden
    logits = np.asarray(lab.head(causal_entry.model, hidden))[:, :-1]
    place = np.arange(1, LENGTH)[None]
    answer = (place >= VALID.sum(1)[:, None]) & (place < np.asarray(state.limit)[:, None])
    want = logits.argmax(-1)
    comparator.assert_same_ids(tokens[:, 1:], want, comparator.top2_gap(logits), answer)
    assert len(np.unique(want[answer])) > 3  # the text is no single repeated id


def test_padding_takes_no_place_and_means_nothing(lab, causal_entry, sampled):
    noise = np.asarray(lab.random_tokens(99, BATCH, WIDTH))
    tokens = np.where(VALID, np.asarray(lab.random_tokens(3, BATCH, WIDTH)), noise)
    state = begin(lab, causal_entry, tokens=tokens)
    np.testing.assert_array_equal(state.prompt_length, VALID.sum(1))
    got = bits(advance(causal_entry.model, PLAIN, state, 1000))
    jax.tree.map(np.testing.assert_array_equal, got, sampled(causal_entry))


def test_rows_do_not_depend_on_their_mates_or_their_place(lab, causal_entry, sampled):
    rows = [2, 0, 2, 1]
    got = bits(advance(causal_entry.model, PLAIN, begin(lab, causal_entry, rows), 1000))
    want = sampled(causal_entry)
    np.testing.assert_array_equal(got.tokens, want.tokens[rows])
    np.testing.assert_array_equal(got.nfe, want.nfe[rows])
    np.testing.assert_array_equal(got.token_evals, want.token_evals[rows])


def test_any_division_of_the_steps_gives_the_same_state(lab, causal_entry, sampled):
    state, seen = begin(lab, causal_entry), {}
    for n in (1, 0, 5, 1, 2, 1, 3, 100):
        state = advance(causal_entry.model, PLAIN, state, n)
        now = bits(state)._replace(sampling=None, extra=None)
        for row in np.flatnonzero(now.done):  # finished rows stay, their memory included
            own = jax.tree.map(lambda x, row=row: x[row], now)
            jax.tree.map(np.testing.assert_array_equal, own, seen.setdefault(row, own))
    assert len(seen) == BATCH
    jax.tree.map(np.testing.assert_array_equal, bits(state), sampled(causal_entry))


def test_alone_as_in_company(lab, causal_entry, sampled):
    for row in (1, 2):
        got = advance(causal_entry.model, PLAIN, begin(lab, causal_entry, [row]), 1000)
        np.testing.assert_array_equal(got.tokens[0], sampled(causal_entry).tokens[row])


def test_what_was_never_written_is_never_read(lab, causal_entry, sampled):
    state = begin(lab, causal_entry)
    entered = VALID.sum(1)

    def spoil(leaf):
        # Slots of attention beyond what was written; recurrent states have no such places.
        if leaf.ndim < 3 or leaf.shape[1] != LENGTH or leaf.dtype != jnp.float32:
            return leaf
        place = np.arange(LENGTH)[None].reshape(1, -1, *(1,) * (leaf.ndim - 2))
        written = place < entered.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(written, leaf, jnp.nan)

    state = state._replace(model_state=jax.tree.map(spoil, state.model_state))
    if causal_entry.name == "attention":
        leaves = jax.tree.leaves(state.model_state.layers)
        assert any(np.isnan(np.asarray(leaf)).any() for leaf in leaves if leaf.ndim > 2)
    got = bits(advance(causal_entry.model, PLAIN, state, 1000))
    np.testing.assert_array_equal(got.tokens, sampled(causal_entry).tokens)
