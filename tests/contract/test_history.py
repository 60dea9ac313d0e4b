"""A sequence means the same however it is cut, padded, packed or batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.context import Context
from genlab.paradigms.masks import Full

LENGTH = 37  # prime, and longer than the windows, the chunks of kernels and the convolutions
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def close(got, want, message=""):
    """Equal to rounding, leaf by leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE, err_msg=message), got, want
    )


def same_bits(got, want):
    """Equal to the bit, leaf by leaf."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def whole(lab):
    """Each model's tokens, hidden states without state, and final state, of one call."""
    made = {}

    def of(entry):
        if entry.name not in made:
            tokens = lab.random_tokens(1, 2, LENGTH)
            free, none = lab.run(entry.model, tokens)
            assert none is None
            out, state = lab.run(entry.model, tokens, entry.model.init_state(2, LENGTH))
            close(out.hidden, free.hidden, "with and without state")
            made[entry.name] = tokens, free.hidden, state
        return made[entry.name]

    return of


CUTS = {
    "1,n-1": [1, LENGTH - 1],
    "n-1,1": [LENGTH - 1, 1],
    "ones": [1] * LENGTH,
    "10,10,17": [10, 10, 17],
}


@pytest.mark.parametrize("cut", CUTS)
def test_chunks_equal_one_call(lab, whole, causal_entry, cut):
    tokens, hidden, final = whole(causal_entry)
    state, at = causal_entry.model.init_state(2, LENGTH), 0
    for size in CUTS[cut]:
        out, state = lab.run(causal_entry.model, tokens[:, at : at + size], state)
        close(out.hidden, hidden[:, at : at + size], f"tokens from {at}")
        at += size
    close(state, final)


def test_an_empty_history_need_not_be_read(lab, whole, causal_entry):
    tokens, hidden, final = whole(causal_entry)
    empty = causal_entry.model.init_state(2, LENGTH)
    out, state = lab.run(causal_entry.model, tokens, empty, Context(history=False))
    close(out.hidden, hidden)
    close(state, final)


def test_the_future_changes_nothing(lab, whole, causal_entry):
    tokens, hidden, _ = whole(causal_entry)
    for at in (1, 16, 36):
        changed = tokens.at[:, at:].set((tokens[:, at:] + 5) % lab.VOCAB)
        got = lab.run(causal_entry.model, changed)[0].hidden
        same_bits(got[:, :at], hidden[:, :at])
        assert np.abs(got[:, at:] - hidden[:, at:]).max() > 0.01  # but itself and what follows


def test_the_distant_past_matters_where_no_window_hides_it(lab, whole, causal_entry):
    if causal_entry.name == "attention_window":
        reach = 2 * (5 - 1)  # two layers of a window of five tokens
    else:
        reach = LENGTH
    tokens, hidden, _ = whole(causal_entry)
    got = lab.run(causal_entry.model, tokens.at[:, 0].add(1) % lab.VOCAB)[0].hidden
    moved = np.abs(got - hidden).max(axis=(0, 2)) > 0
    assert moved[: min(reach, 4)].all()
    assert not moved[reach + 1 :].any()


def filled(state, value):
    """A state whose unwritten memory of floating-point numbers holds `value`."""
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a: jnp.full_like(a, value) if is_float(a) else a, state)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("junk", [float("nan"), 1e4])
def test_unwritten_memory_is_never_read(lab, causal_entry, junk, history):
    model = causal_entry.model
    tokens = lab.random_tokens(2, 3, 17)
    lengths = jnp.array([10, 17, 3])
    ctx, more = Context(lengths=lengths, history=history), Context()
    got = []
    for state in (model.init_state(3, LENGTH), filled(model.init_state(3, LENGTH), junk)):
        first, state = lab.run(model, tokens, state, ctx)
        looked, _ = lab.verify(model, tokens[:, :4], state, more)
        then, _ = lab.run(model, tokens[:, :1], state, more)
        got.append((first.hidden, looked.hidden, then.hidden))
    same_bits(got[1], got[0])
    assert all(np.isfinite(h).all() for h in got[1])


# Places of seven tokens among ten. The last row is all padding.
LAYOUTS = {
    "left": [3, 4, 5, 6, 7, 8, 9],
    "right": [0, 1, 2, 3, 4, 5, 6],
    "holes": [0, 2, 3, 5, 6, 7, 9],
    "mixed": [1, 2, 3, 4, 6, 7, 8],
}


def layouts(lab, seed):
    """Tokens (5 10) with random ids at padding, valid, and the places of the real ones (4 7)."""
    at = jnp.array(list(LAYOUTS.values()))
    valid = jnp.zeros((5, 10), bool).at[jnp.arange(4)[:, None], at].set(True)
    return lab.random_tokens(seed, 5, 10), valid, at


@pytest.mark.parametrize("told", ["valid", "segment_ids"])
def test_padding_anywhere_equals_the_row_alone(lab, causal_entry, told):
    model = causal_entry.model
    tokens, valid, at = layouts(lab, 3)
    ctx = Context(valid=valid)
    if told == "segment_ids":
        ctx = Context(segment_ids=jnp.where(valid, 0, -1))
    free = lab.run(model, tokens, None, ctx)[0].hidden
    out, state = lab.run(model, tokens, model.init_state(5, 20), ctx)
    again, final = lab.run(model, tokens, state, ctx)  # the same again, on top of a history
    for row in range(4):
        real = tokens[row : row + 1, at[row]]
        alone, own = lab.run(model, real, model.init_state(1, 20))
        close(out.hidden[row, at[row]], alone.hidden[0])
        close(free[row, at[row]], alone.hidden[0])
        close(jax.tree.map(lambda a, r=row: a[r : r + 1], state), own)
        alone, own = lab.run(model, real, own)
        close(again.hidden[row, at[row]], alone.hidden[0])
        close(jax.tree.map(lambda a, r=row: a[r : r + 1], final), own)
    for hidden in (free, out.hidden, again.hidden):
        np.testing.assert_array_equal(hidden[~np.array(valid)], 0)
    blank = model.init_state(1, 20)
    same_bits(jax.tree.map(lambda a: a[4:5], final), blank)


def test_what_stands_at_padding_changes_no_bit(lab, causal_entry):
    model = causal_entry.model
    tokens, valid, _ = layouts(lab, 4)
    pad, used = lab.VOCAB - 1, lab.VOCAB - 2
    tokens = jnp.where(valid, jnp.minimum(tokens, used), pad)
    loud = model.params | {"embedding": model.params["embedding"].at[pad].set(1e3)}
    ctx, state = Context(valid=valid), model.init_state(5, 20)
    got = lab.run(model.with_params(loud), tokens, state, ctx)
    want = lab.run(model, tokens, state, ctx)
    same_bits(got, want)
    same_bits(
        lab.run(model.with_params(loud), tokens, None, ctx)[0],
        lab.run(model, tokens, None, ctx)[0],
    )


DOCUMENTS = [(0, 8), (8, 15), (15, 20)]  # of a packed row


def packed(lab):
    """Tokens (2 20) and segment ids: three documents, then only the second and padding."""
    tokens = lab.random_tokens(5, 2, 20)
    ids = jnp.concatenate([jnp.full((end - begin,), n) for n, (begin, end) in enumerate(DOCUMENTS)])
    return tokens, jnp.stack([ids, jnp.where(ids == 1, 7, -1)]).astype(jnp.int32)


def test_packed_documents_equal_separate_ones(lab, causal_entry):
    model = causal_entry.model
    tokens, segment_ids = packed(lab)
    ctx = Context(segment_ids=segment_ids)
    free = lab.run(model, tokens, None, ctx)[0].hidden
    out, state = lab.run(model, tokens, model.init_state(2, 40), ctx)
    close(out.hidden, free)
    # The last document goes on without being told again.
    more, _ = lab.run(model, tokens[:, :1], state)
    lengths = jnp.array([end - begin for begin, end in DOCUMENTS])
    rows = [jnp.pad(tokens[0, b:e], (0, 8 - (e - b))) for b, e in DOCUMENTS]
    rows.append(jnp.pad(tokens[1, 8:15], (0, 1)))
    lengths = jnp.append(lengths, 7)
    alone, own = lab.run(model, jnp.stack(rows), model.init_state(4, 40), Context(lengths=lengths))
    for row, (begin, end) in enumerate(DOCUMENTS):
        close(free[0, begin:end], alone.hidden[row, : end - begin])
    close(free[1, 8:15], alone.hidden[3, :7])
    last = jnp.stack([tokens[0, 0]] * 3 + [tokens[1, 0]])[:, None]
    then, _ = lab.run(model, last, own)
    close(more.hidden[0, 0], then.hidden[2, 0], "continued document of row 0")
    close(more.hidden[1, 0], then.hidden[3, 0], "continued document of row 1")


@pytest.mark.parametrize("first", [8, 10])
def test_documents_may_end_at_or_inside_a_chunk(lab, causal_entry, first):
    model = causal_entry.model
    tokens, segment_ids = packed(lab)
    whole, final = lab.run(
        model, tokens, model.init_state(2, 40), Context(segment_ids=segment_ids)
    )
    state, got = model.init_state(2, 40), []
    # One program for both cuts: twelve places, of which the first chunk leaves some empty.
    for begin, end in ((0, first), (first, 20)):
        room = ((0, 0), (0, 12 - (end - begin)))
        ids = jnp.pad(segment_ids[:, begin:end], room, constant_values=-1)
        piece = jnp.pad(tokens[:, begin:end], room)
        out, state = lab.run(model, piece, state, Context(segment_ids=ids))
        got.append(out.hidden[:, : end - begin])
    close(jnp.concatenate(got, axis=1), whole.hidden)
    close(state, final)


def test_documents_do_not_influence_one_another(lab, causal_entry):
    model = causal_entry.model
    tokens, segment_ids = packed(lab)
    ctx = Context(segment_ids=segment_ids)
    want = lab.run(model, tokens, None, ctx)[0].hidden
    for begin, end in DOCUMENTS:
        changed = tokens.at[0, begin:end].set((tokens[0, begin:end] + 3) % lab.VOCAB)
        got = lab.run(model, changed, None, ctx)[0].hidden
        others = np.ones(20, bool)
        others[begin:end] = False
        same_bits(got[0, others], want[0, others])
        assert (np.abs(got[0, begin:end] - want[0, begin:end]).max(axis=-1) > 0).all()


def test_both_ways_every_token_counts_and_padding_does_not(lab, full_entry):
    if full_entry.refusal(Full()) is not None:
        pytest.skip("refuses to look ahead: test_registry.py")
    model = full_entry.model
    tokens, valid, at = layouts(lab, 6)
    hidden = lab.run(model, tokens, None, Context(valid=valid, mask=Full()))[0].hidden
    for row in range(4):
        alone = lab.run(model, tokens[row : row + 1, at[row]], None, Context(mask=Full()))[0]
        close(hidden[row, at[row]], alone.hidden[0])
        last = tokens[row : row + 1, at[row]].at[0, 3].add(1) % lab.VOCAB
        other = lab.run(model, last, None, Context(mask=Full()))[0]
        moved = np.abs(other.hidden - alone.hidden).max(axis=-1)[0] > 0
        assert moved[2:5].all()  # the neighbours on both sides, whatever the reach


def test_both_ways_documents_stay_apart(lab, full_entry):
    if full_entry.refusal(Full()) is not None:
        pytest.skip("refuses to look ahead: test_registry.py")
    model = full_entry.model
    tokens, segment_ids = packed(lab)
    ctx = Context(segment_ids=segment_ids, mask=Full())
    want = lab.run(model, tokens, None, ctx)[0].hidden
    changed = tokens.at[0, 8:15].set((tokens[0, 8:15] + 3) % lab.VOCAB)
    got = lab.run(model, changed, None, ctx)[0].hidden
    same_bits(np.delete(got[0], np.s_[8:15], axis=0), np.delete(want[0], np.s_[8:15], axis=0))
