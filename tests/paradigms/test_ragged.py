"""Bringing valid tokens to the front and back: orders, positions, documents, by brute force."""

import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.context import Context
from genlab.paradigms.ragged import ModelState, compact, original_to_compacted, restore
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, LENGTH = 3, 7


def state_of(length, segment, segment_start):
    """A model state without layers."""
    arrays = (jnp.array(v, jnp.int32) for v in (length, segment, segment_start))
    return ModelState((), *arrays)


def by_hand(tokens, valid, ids, start, segment, segment_start):
    """One row, token by token: lists over its valid tokens, and what the state becomes."""
    rows, at, current, begun = [], start, segment if start else None, segment_start
    for token, real, document in zip(tokens, valid, ids, strict=True):
        if not real or document < 0:
            continue
        starts = current is None or document != current
        if starts:
            current, begun = document, at
        rows.append((token, at, at - begun, document, starts))
        at += 1
    last = segment if current is None or not rows else current
    return rows, last, begun if rows else segment_start


row_bools = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
row_ids = st.lists(st.integers(0, 2), min_size=LENGTH, max_size=LENGTH).map(sorted)
rows = lambda one: st.lists(one, min_size=ROWS, max_size=ROWS)  # noqa: E731


@settings(max_examples=25)
@given(rows(row_bools), rows(row_ids), rows(st.sampled_from([0, 1, 5])), st.booleans())
def test_every_row_as_if_by_hand(valid, ids, start, stateful):
    valid, ids = np.array(valid), np.array(ids, np.int32)
    tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
    start = np.array(start if stateful else [0] * ROWS)
    segment, segment_start = np.zeros(ROWS, int), np.minimum(start, 1)
    state = state_of(start, segment, segment_start) if stateful else None
    ctx = Context(valid=jnp.asarray(valid), segment_ids=jnp.asarray(ids))
    got = compact(jnp.asarray(tokens), state, ctx)
    layer = got.layer_ctx
    for r in range(ROWS):
        want, last, begun = by_hand(
            tokens[r], valid[r], ids[r], start[r], segment[r], segment_start[r]
        )
        n = len(want)
        assert layer.lengths[r] == n and layer.start[r] == start[r]
        fields = (got.tokens, layer.order, layer.positions, layer.segment_ids,
                  layer.starts_document)
        for field, values in zip(fields, zip(*want, strict=True), strict=False):
            np.testing.assert_array_equal(field[r, :n], values)
        assert (np.asarray(layer.segment_ids[r, n:]) == -1).all()
        assert not np.asarray(layer.starts_document[r, n:]).any()
        assert (got.segment[r], got.segment_start[r]) == (last, begun if n else segment_start[r])
    x = np.asarray(got.tokens, np.float32)[..., None] + 1
    back = np.asarray(restore(jnp.asarray(x), got))[..., 0]
    np.testing.assert_array_equal(back, np.where(valid, tokens + 1, 0))


def test_without_padding_nothing_moves():
    tokens = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    got = compact(tokens, None, Context())
    assert got.source is None
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_array_equal(got.layer_ctx.positions, [[0, 1, 2]] * 2)
    assert not got.layer_ctx.history and got.layer_ctx.mask_is_causal


def test_lengths_and_the_same_as_valid_agree():
    tokens, lengths = jnp.arange(10, dtype=jnp.int32).reshape(2, 5), jnp.array([3, 0], jnp.int32)
    valid = jnp.arange(5)[None] < lengths[:, None]
    a, b = compact(tokens, None, Context(lengths=lengths)), compact(tokens, None,
                                                                    Context(valid=valid))
    for field in ("order", "positions", "segment_ids", "starts_document", "lengths"):
        np.testing.assert_array_equal(getattr(a.layer_ctx, field), getattr(b.layer_ctx, field))


def test_a_row_without_ids_continues_the_document_it_ends_with():
    state = state_of([4, 0], [9, 0], [3, 0])
    got = compact(jnp.zeros((2, 2), jnp.int32), state, Context())
    np.testing.assert_array_equal(got.layer_ctx.segment_ids, [[9, 9], [0, 0]])
    np.testing.assert_array_equal(got.layer_ctx.positions, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(got.layer_ctx.starts_document, [[False] * 2, [True, False]])


def test_a_tree_s_orders_are_depths_and_padding_may_stand_in_it():
    parents = jnp.array([[-1, -1, 0, -1, 2]], jnp.int32)  # token 1 is padding
    valid = jnp.array([[True, False, True, True, True]])
    state = state_of([6], [0], [2])
    tokens = jnp.arange(5, dtype=jnp.int32)[None]
    got = compact(tokens, state, Context(valid=valid, parents=parents))
    np.testing.assert_array_equal(got.tokens[0, :4], [0, 2, 3, 4])
    np.testing.assert_array_equal(got.layer_ctx.parents[0, :4], [-1, 0, -1, 1])
    np.testing.assert_array_equal(got.layer_ctx.order[0, :4], [6, 7, 6, 8])
    np.testing.assert_array_equal(got.layer_ctx.positions[0, :4], [4, 5, 4, 6])
    path = original_to_compacted(jnp.array([[0, 2, 4]], jnp.int32), got.source)
    np.testing.assert_array_equal(path, [[0, 1, 3]])


@pytest.mark.parametrize(("ctx", "message"), [
    (Context(valid=jnp.ones((1, 3), bool), lengths=jnp.array([3])), "valid or lengths, not both"),
    (Context(valid=jnp.ones((1, 4), bool)), r"valid has shape \(1, 4\), want \(1, 3\)"),
    (Context(valid=jnp.ones((1, 3), jnp.int32)), "valid has dtype int32, want bool"),
    (Context(valid=jnp.ones((1, 3))), "valid has dtype float32, want bool"),
    (Context(segment_ids=jnp.ones((3,), jnp.int32)), r"segment_ids has shape \(3,\)"),
    (Context(parents=jnp.ones((2, 3), jnp.int32)), r"parents has shape \(2, 3\)"),
    (Context(lengths=jnp.ones((2,), jnp.int32)), r"lengths has shape \(2,\), want \(1,\)"),
])
def test_arrays_that_do_not_fit_are_refused(ctx, message):
    with pytest.raises(ValueError, match=message):
        compact(jnp.zeros((1, 3), jnp.int32), None, ctx)
