"""A sequence means the same however it is cut, padded, packed or batched."""

import jax
import numpy as np
import pytest
from genlab.paradigms.context import Context
from genlab.paradigms.masks import Full

# Few shapes, since each costs a compilation per model: four rows, or one for a row alone.
ROWS, ROOM = 4, 40
LENGTH = 37  # prime, and longer than the windows, the convolutions and the kernels' chunks
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def close(got, want, message=""):
    """Equal to rounding, leaf by leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE, err_msg=message), got, want
    )


def same_bits(got, want):
    """Equal to the bit, leaf by leaf."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def row_of(state, row):
    """One row of a state, on the host."""
    return jax.tree.map(lambda a: np.asarray(a)[row : row + 1], state)


def lengths_of(*lengths):
    """A context that says how many tokens each row has."""
    return Context(lengths=np.array(lengths, np.int32))


@pytest.fixture(scope="module")
def call(lab):
    """Runs a model: hidden states on the host, and the state."""

    def of(model, tokens, state=None, ctx=Context()):  # noqa: B008  (frozen)
        out, state = lab.run(model, tokens, state, ctx)
        return np.asarray(out.hidden), state

    return of


@pytest.fixture(scope="module")
def whole(lab, call):
    """Each model's tokens, hidden states without state, and final state, of one call."""
    made = {}

    def of(entry):
        if entry.name not in made:
            tokens = lab.random_tokens(1, ROWS, LENGTH)
            free, none = call(entry.model, tokens)
            assert none is None
            hidden, state = call(entry.model, tokens, entry.model.init_state(ROWS, ROOM))
            close(hidden, free, "with and without state")
            made[entry.name] = tokens, free, state
        return made[entry.name]

    return of


@pytest.mark.parametrize(
    "sizes", [[1, 36], [36, 1], [1] * 37, [10, 10, 17]], ids=["1-36", "36-1", "ones", "10-10-17"]
)
def test_chunks_equal_one_call(call, whole, causal_entry, sizes):
    tokens, hidden, final = whole(causal_entry)
    state, at = causal_entry.model.init_state(ROWS, ROOM), 0
    for size in sizes:
        piece = tokens[:, at : at + size]
        got, state = call(causal_entry.model, piece, state, lengths_of(*[size] * ROWS))
        close(got, hidden[:, at : at + size], f"tokens from {at}")
        at += size
    assert at == LENGTH
    close(state, final)


def test_the_future_changes_nothing(lab, call, whole, causal_entry):
    tokens, hidden, _ = whole(causal_entry)
    for at in (1, 16, 36):
        changed = tokens.copy()
        changed[:, at:] = (changed[:, at:] + 5) % lab.VOCAB
        got, _ = call(causal_entry.model, changed)
        same_bits(got[:, :at], hidden[:, :at])
        assert np.abs(got[:, at:] - hidden[:, at:]).max() > 0.01  # but itself and what follows


def test_the_past_matters_as_far_as_the_windows_reach(lab, call, whole, causal_entry):
    tokens, hidden, _ = whole(causal_entry)
    changed = tokens.copy()
    changed[:, 0] = (changed[:, 0] + 5) % lab.VOCAB
    got, _ = call(causal_entry.model, changed)
    moved = np.abs(got - hidden).max(axis=(0, 2)) > 0
    reach = 2 * (5 - 1) if causal_entry.name == "attention_window" else LENGTH
    assert moved[: min(reach + 1, 4)].all()
    assert not moved[reach + 1 :].any()


def filled(state, value):
    """A state whose memory of floating-point numbers, none of it written yet, holds `value`."""
    return jax.tree.map(
        lambda a: np.full(a.shape, value, a.dtype) if a.dtype.kind == "f" else np.asarray(a), state
    )


@pytest.mark.parametrize("history", [True, False])
def test_unwritten_memory_is_never_read(lab, call, causal_entry, history):
    model = causal_entry.model
    tokens = lab.random_tokens(2, ROWS, 17)
    lengths = np.array([10, 17, 3, 0], np.int32)
    ctx = Context(lengths=lengths, history=history)
    ones = lengths_of(1, 1, 1, 1)
    empty = model.init_state(ROWS, ROOM)
    got = []
    for state in (empty, filled(empty, np.nan), filled(empty, 1e4)):
        first, state = call(model, tokens, state, ctx)
        looked = np.asarray(lab.verify(model, tokens[:, :4], state)[0].hidden)
        then, _ = call(model, tokens[:, :1], state, ones)
        got.append((first, looked, then))
    assert all(np.isfinite(h).all() for h in got[0])
    same_bits(got[1], got[0])
    same_bits(got[2], got[0])


def test_a_promise_of_no_history_changes_nothing(lab, call, causal_entry):
    model = causal_entry.model
    tokens, lengths = lab.random_tokens(2, ROWS, 17), np.array([10, 17, 3, 0], np.int32)
    empty = model.init_state(ROWS, ROOM)
    promised, told = (Context(lengths=lengths, history=h) for h in (False, True))
    close(call(model, tokens, empty, promised), call(model, tokens, empty, told))


# Places of seven tokens among ten; a fourth row is all padding.
PLACES = np.array([[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6, 8, 9]])


def padded_rows(lab, seed):
    """Tokens (4 10) with random ids at padding, and valid: pads left, right, in holes, all."""
    valid = np.zeros((ROWS, 10), bool)
    valid[np.arange(3)[:, None], PLACES] = True
    return lab.random_tokens(seed, ROWS, 10), valid


def test_padding_anywhere_equals_the_row_alone(lab, call, causal_entry):
    model = causal_entry.model
    tokens, valid = padded_rows(lab, 3)
    ctx = Context(valid=valid)
    free, _ = call(model, tokens, None, ctx)
    first, state = call(model, tokens, model.init_state(ROWS, ROOM), ctx)
    again, final = call(model, tokens, state, ctx)  # once more, on top of a history
    for row, at in enumerate(PLACES):
        real = tokens[row : row + 1, at]
        alone, own = call(model, real, model.init_state(1, ROOM))
        close(first[row, at], alone[0])
        close(free[row, at], alone[0])
        close(row_of(state, row), own)
        alone, own = call(model, real, own)
        close(again[row, at], alone[0])
        close(row_of(final, row), own)
    for hidden in (free, first, again):
        np.testing.assert_array_equal(hidden[~valid], 0)
    same_bits(row_of(final, 3), model.init_state(1, ROOM))


def test_what_stands_at_padding_changes_no_bit(lab, call, causal_entry):
    model = causal_entry.model
    tokens, valid = padded_rows(lab, 4)
    pad = lab.VOCAB - 1
    tokens = np.where(valid, np.minimum(tokens, pad - 1), pad)
    embedding = np.array(model.params["embedding"])
    embedding[pad] = 1e3
    loud = model.with_params(model.params | {"embedding": embedding})
    ctx = Context(valid=valid)
    for state in (None, model.init_state(ROWS, ROOM)):
        same_bits(call(loud, tokens, state, ctx), call(model, tokens, state, ctx))


DOCUMENTS = [(0, 8), (8, 15), (15, 20)]  # of a packed row


def packed_rows(lab):
    """Tokens (4 20) and segment ids: three documents, and each of them between padding."""
    tokens = lab.random_tokens(5, ROWS, 20)
    ids = np.repeat(np.arange(3), [end - begin for begin, end in DOCUMENTS])
    rows = [ids, *(np.where(ids == n, 7, -1) for n in range(3))]
    tokens[1:] = tokens[0]
    return tokens, np.stack(rows).astype(np.int32)


def test_packed_documents_equal_separate_ones(lab, call, causal_entry):
    model = causal_entry.model
    tokens, segment_ids = packed_rows(lab)
    ctx = Context(segment_ids=segment_ids)
    free, _ = call(model, tokens, None, ctx)
    hidden, state = call(model, tokens, model.init_state(ROWS, ROOM), ctx)
    close(hidden, free)
    ones = lengths_of(1, 1, 1, 1)
    more, _ = call(model, tokens[:, :1], state, ones)  # the last document goes on untold
    separate = np.zeros((ROWS, 17), np.int32)
    for row, (begin, end) in enumerate(DOCUMENTS):
        separate[row, : end - begin] = tokens[0, begin:end]
    alone, own = call(model, separate, model.init_state(ROWS, ROOM), lengths_of(8, 7, 5, 0))
    then, _ = call(model, tokens[:, :1], own, ones)
    for row, (begin, end) in enumerate(DOCUMENTS):
        close(free[0, begin:end], alone[row, : end - begin])
        close(free[row + 1, begin:end], alone[row, : end - begin], "between padding")
        close(more[row + 1, 0], then[row, 0], "continued")
    close(more[0, 0], then[2, 0], "the third document continued")


@pytest.mark.parametrize("first", [8, 10])
def test_documents_may_end_at_or_inside_a_chunk(lab, call, causal_entry, first):
    model = causal_entry.model
    tokens, segment_ids = packed_rows(lab)
    empty = model.init_state(ROWS, ROOM)
    hidden, final = call(model, tokens, empty, Context(segment_ids=segment_ids))
    state, got = empty, []
    for begin, end in ((0, first), (first, 20)):
        room = ((0, 0), (0, 20 - (end - begin)))  # one program for both chunks
        ids = np.pad(segment_ids[:, begin:end], room, constant_values=-1)
        piece = np.pad(tokens[:, begin:end], room)
        part, state = call(model, piece, state, Context(segment_ids=ids))
        got.append(part[:, : end - begin])
    close(np.concatenate(got, axis=1), hidden)
    close(state, final)


def test_documents_do_not_influence_one_another(lab, call, causal_entry):
    model = causal_entry.model
    tokens, segment_ids = packed_rows(lab)
    ctx = Context(segment_ids=segment_ids)
    want, _ = call(model, tokens, None, ctx)
    for begin, end in DOCUMENTS:
        changed = tokens.copy()
        changed[0, begin:end] = (changed[0, begin:end] + 5) % lab.VOCAB
        got, _ = call(model, changed, None, ctx)
        same_bits(np.delete(got[0], np.s_[begin:end], 0), np.delete(want[0], np.s_[begin:end], 0))
        assert (np.abs(got[0, begin:end] - want[0, begin:end]).max(axis=-1) > 0).all()


def refuses_to_look_ahead(entry):
    """True for a model that honours causal masks only: it has to say so (see test_registry.py)."""
    reason = entry.refusal(Full())
    assert reason is None or "causal" in reason
    return reason is not None


def test_both_ways_neighbours_count_and_padding_does_not(lab, call, full_entry):
    if refuses_to_look_ahead(full_entry):
        return
    model = full_entry.model
    tokens, valid = padded_rows(lab, 6)
    hidden, _ = call(model, tokens, None, Context(valid=valid, mask=Full()))
    for row, at in enumerate(PLACES):
        real = tokens[row : row + 1, at]
        alone, _ = call(model, real, None, Context(mask=Full()))
        close(hidden[row, at], alone[0])
        real[0, 3] = (real[0, 3] + 5) % lab.VOCAB
        other, _ = call(model, real, None, Context(mask=Full()))
        assert (np.abs(other - alone).max(axis=-1)[0, 2:5] > 0).all()
    np.testing.assert_array_equal(hidden[~valid], 0)


def test_both_ways_documents_stay_apart(lab, call, full_entry):
    if refuses_to_look_ahead(full_entry):
        return
    model = full_entry.model
    tokens, segment_ids = packed_rows(lab)
    ctx = Context(segment_ids=segment_ids, mask=Full())
    want, _ = call(model, tokens, None, ctx)
    changed = tokens.copy()
    changed[0, 8:15] = (changed[0, 8:15] + 5) % lab.VOCAB
    got, _ = call(model, changed, None, ctx)
    same_bits(np.delete(got[0], np.s_[8:15], 0), np.delete(want[0], np.s_[8:15], 0))
    close(want[0, 8:15], want[2, 8:15], "in company and alone")
