"""What each mask lets a token see, from a plain definition, after padding was sorted out too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.attention import AttentionMask
from genlab.paradigms.context import Context, tree_ancestors
from genlab.paradigms.masks import EVERYTHING, BlockCausal, Causal, Full, Prefix, Vectors
from genlab.paradigms.ragged import ModelState, compact

LENGTH = 8
ORDER = np.arange(LENGTH, dtype=np.int32)


def visible(mask, valid=None, start=0):
    """(T T) of the caller's tokens: query t sees key s."""
    state = None
    if start:
        row = (jnp.array([start]), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
        state = ModelState((), *row)
    tokens = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    ctx = Context(mask=mask, valid=None if valid is None else jnp.asarray(valid)[None])
    compacted = compact(tokens, state, ctx)
    c = compacted.layer_ctx
    dense = AttentionMask(
        q_lo=c.bounds.q_lo,
        q_hi=c.bounds.q_hi,
        k_order=jnp.where(c.segment_ids >= 0, c.order, -1),
        q_segment=c.segment_ids,
        k_segment=c.segment_ids,
        q_tag=c.bounds.q_tag,
        k_tag=c.bounds.k_tag,
    ).dense()[0]
    back = np.arange(LENGTH)
    if compacted.source is not None:
        back = np.argsort(np.asarray(compacted.source[0]))
    return np.asarray(dense)[back][:, back]


def vectors(q_lo, q_hi, q_tag=None, k_tag=None):
    """A `Vectors` mask for one row."""
    given = (q_lo, q_hi, q_tag, k_tag)
    return Vectors(*(None if v is None else jnp.array(v, jnp.int32)[None] for v in given))


t, s = np.meshgrid(ORDER, ORDER, indexing="ij")
EXPECTED = {
    "causal": (Causal(), s <= t),
    "full": (Full(), t >= 0),
    "prefix": (Prefix(jnp.array([3])), (s <= t) | (s < 3) & (t < 3)),
    "prefix of nothing": (Prefix(jnp.array([0])), s <= t),
    "blocks": (BlockCausal(3), s // 3 <= t // 3),
    "blocks of one": (BlockCausal(1), s <= t),
    "blocks after a prompt": (
        BlockCausal(3, first=jnp.array([2])),
        np.where(t < 2, s < 2, (s < 2) | ((s - 2) // 3 <= (t - 2) // 3)),
    ),
    "vectors": (vectors([0, 0, 1, 1, 0, 0, 4, 4], [7, 0, 1, 2, 3, 4, 5, 6]),
                (np.array([0, 0, 1, 1, 0, 0, 4, 4])[:, None] <= s)
                & (s <= np.array([7, 0, 1, 2, 3, 4, 5, 6])[:, None])),
    "tags": (vectors([9] * 8, [0] * 8, [0, 0, 1, 1, -1, -1, 2, 2], [1, 0, 0, 1, -1, -1, 2, 3]),
             np.array([[0, 1, 1, 0, 0, 0, 0, 0]] * 2 + [[1, 0, 0, 1, 0, 0, 0, 0]] * 2
                      + [[0] * 8] * 2 + [[0, 0, 0, 0, 0, 0, 1, 0]] * 2, bool)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_visible(name):
    mask, want = EXPECTED[name]
    np.testing.assert_array_equal(visible(mask), want)
    assert mask.is_causal == (name == "causal")


@pytest.mark.parametrize("name", ["causal", "full", "prefix", "blocks", "blocks after a prompt"])
def test_padding_takes_no_part_and_no_order(name):
    mask, want = EXPECTED[name]
    valid = np.array([0, 1, 1, 0, 1, 1, 0, 1], bool)
    got = visible(mask, valid)
    count = valid.sum()
    np.testing.assert_array_equal(got[np.ix_(valid, valid)], want[:count, :count])
    assert not got[~valid].any() and not got[:, ~valid].any()


def test_given_vectors_follow_their_tokens():
    lo, hi = np.zeros(LENGTH, int), np.array([9, 0, 5, 9, 5, 1, 9, 0])
    valid = np.array([0, 1, 1, 0, 1, 1, 0, 1], bool)
    got = visible(vectors(lo, hi), valid)
    order = np.cumsum(valid) - 1
    want = (order[None] <= hi[:, None]) & valid[None] & valid[:, None]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("start", [1, 4, 5])
def test_blocks_are_counted_from_the_row_s_beginning(start):
    bounds = BlockCausal(3).bounds(jnp.asarray(ORDER[None] + start))
    want = ((ORDER + start) // 3 + 1) * 3 - 1
    np.testing.assert_array_equal(bounds.q_hi[0], want)
    np.testing.assert_array_equal(Causal().bounds(jnp.asarray(ORDER[None] + start)).q_hi[0],
                                  ORDER + start)


def test_a_context_of_a_million_is_still_everything():
    order = jnp.array([[0, 2**20]], jnp.int32)
    assert (Full().bounds(order).q_hi >= 2**20).all() and EVERYTHING < 2**31 - 2**20


def test_masks_cross_jit_as_data():
    traces = []

    @jax.jit
    def run(mask):
        traces.append(1)
        return mask.bounds(jnp.asarray(ORDER[None])).q_hi

    first, second = run(Prefix(jnp.array([2]))), run(Prefix(jnp.array([5])))
    assert len(traces) == 1 and (first != second).any()


def test_ancestors_of_random_trees():
    draw = np.random.default_rng(0)
    parents = np.stack([[draw.integers(-1, max(i, 1)) if i else -1 for i in range(9)]
                        for _ in range(4)]).astype(np.int32)
    want = np.zeros((4, 9, 9), bool)
    for row in range(4):
        for node in range(9):
            at = node
            while at >= 0:
                want[row, node, at] = True
                at = parents[row, at]
    np.testing.assert_array_equal(tree_ancestors(jnp.asarray(parents), (4, 9)), want)
    chain = tree_ancestors(None, (2, 4))
    np.testing.assert_array_equal(chain, np.broadcast_to(np.tril(np.ones((4, 4), bool)), (2, 4, 4)))
