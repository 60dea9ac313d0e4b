"""Packing: the index equals the ring laid out, rows are full, nothing is lost or doubled."""

import itertools

import numpy as np
import pytest
from genlab.errors import DataError
from genlab.train.data.packing import PackedRows, pack_documents
from genlab.train.data.tokenizer import BytesTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import make_store

SPECIALS = BytesTokenizer().specials


def laid_out_rows(store, *, length, seed, epoch):
    """The definition, slowly: lay the ring out, walk it, cut it, then serve rows in drawn order."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    order = sorted(enumerate(bits.random_raw(store.num_documents)), key=lambda pair: pair[1])
    ring = []
    for document, _ in order:
        ring += [SPECIALS.bos, *store.document(document).tolist(), SPECIALS.eos]
    shift = int(bits.random_raw()) % len(ring)
    ring = ring[shift:] + ring[:shift]
    rows = []
    for r in range(len(ring) // (length - 1)):
        content = [ring[(r * (length - 1) + i) % len(ring)] for i in range(length)]
        begins_document = content[0] == SPECIALS.bos
        rows.append(content if begins_document else [SPECIALS.bos, *content[:-1]])
    served = sorted(enumerate(bits.random_raw(len(rows))), key=lambda pair: pair[1])
    return [rows[r] for r, _ in served]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda n: sum(n) > 0),
    length=st.integers(2, 9),
    seed=st.integers(0, 3),
)
def test_rows_equal_the_ring_laid_out(lengths, length, seed):
    store = make_store(lengths)
    if store.num_tokens + 2 * len(lengths) < length:
        return
    rows = PackedRows(store, length=length, seed=seed)
    number = 2 * rows.rows_per_epoch + 1  # across two borders of epochs
    batch = rows(np.arange(number))
    epochs = (laid_out_rows(store, length=length, seed=seed, epoch=e) for e in range(3))
    expected = list(itertools.chain.from_iterable(epochs))[:number]
    assert batch.tokens.tolist() == expected
    for row, segments, mask in zip(*batch, strict=True):
        segment = -1
        for token, got, scored in zip(row, segments, mask, strict=True):
            segment += token == SPECIALS.bos
            assert got == segment
            assert scored == (token != SPECIALS.bos)


def test_contract_of_a_batch(store_of):
    batch = PackedRows(store_of([5, 9, 30]), length=8, seed=1)(np.arange(20))
    assert batch.tokens.shape == batch.segment_ids.shape == batch.loss_mask.shape == (20, 8)
    assert (batch.tokens.dtype, batch.segment_ids.dtype) == (np.int32, np.int32)
    assert batch.loss_mask.dtype == bool
    assert (batch.tokens[:, 0] == SPECIALS.bos).all()
    doubled = (batch.tokens[:, 1:] == SPECIALS.bos) & (batch.tokens[:, :-1] == SPECIALS.bos)
    assert not doubled.any()
    assert (batch.segment_ids[:, 0] == 0).all() and (batch.segment_ids >= 0).all()


def test_an_epoch_shows_every_token_once(store_of):
    """With T - 1 dividing the ring and one-byte-apart tokens, each token is scored once."""
    store = store_of([10, 22, 4, 50])  # the ring has 94 tokens = 2 * 47
    store.tokens[:] = np.arange(86)
    rows = PackedRows(store, length=48, seed=3)
    batch = rows(np.arange(rows.rows_per_epoch))
    shown = np.sort(batch.tokens[batch.loss_mask])
    text = shown[shown < 256]
    assert set(text) == set(range(86))
    starting = (batch.tokens[:, 0] == SPECIALS.bos).sum()
    assert len(text) - 86 <= starting  # at most one more where a row starts with its document


def test_epochs_and_seeds_differ(store_of):
    store = store_of([40] * 10)
    rows = PackedRows(store, length=16, seed=0)
    n = rows.rows_per_epoch
    first, second = rows(np.arange(n)).tokens, rows(np.arange(n, 2 * n)).tokens
    other = PackedRows(store, length=16, seed=1)(np.arange(n)).tokens
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_a_batch_mixes_documents():
    """Rows next to each other come from all over the epoch, not from one long document."""
    store = make_store([1000] * 10)
    store.tokens[:] = np.repeat(np.arange(10), 1000)
    batch = PackedRows(store, length=11, seed=0)(np.arange(16))
    assert len(set(batch.tokens[:, 5])) >= 5


def test_rows_are_a_pure_function(store_of):
    store = store_of([7, 80, 33])
    whole = PackedRows(store, length=12, seed=5)(np.arange(50))
    fresh = PackedRows(store, length=12, seed=5)
    for number in (49, 3, 20, 3):
        row = fresh([number])
        for a, b in zip(row, whole, strict=True):
            assert np.array_equal(a[0], b[number])


def test_draws_are_pinned(store_of):
    """A change of these values would silently give resumed runs other data."""
    rows = PackedRows(store_of([3, 5, 4, 8, 2, 9]), length=7, seed=7)
    epoch = rows._epoch(2)
    assert epoch.documents.tolist() == [4, 0, 1, 5, 3, 2]
    assert (epoch.shift, epoch.rows.tolist()) == (33, [0, 1, 5, 4, 3, 6, 2])


def test_short_corpus_names_both_numbers(store_of):
    with pytest.raises(DataError, match=r"102 tokens.*context length of 128"):
        PackedRows(store_of([100]), length=128, seed=0)
    PackedRows(store_of([100]), length=102, seed=0)([0, 1, 2])
    with pytest.raises(DataError, match="103"):
        PackedRows(store_of([100]), length=103, seed=0)
    with pytest.raises(DataError, match="0 documents"):
        PackedRows(store_of([]), length=8, seed=0)
    with pytest.raises(DataError, match="length 1"):
        PackedRows(store_of([100]), length=1, seed=0)
    with pytest.raises(DataError, match="seed"):
        PackedRows(store_of([100]), length=8, seed=-1)


def test_pack_documents():
    batch = pack_documents([[1, 2, 3], [4], [5, 6], []], length=8, specials=SPECIALS, rows=3)
    bos, eos, pad, _ = SPECIALS
    assert batch.tokens.tolist() == [
        [bos, 1, 2, 3, eos, bos, 4, eos],
        [bos, 5, 6, eos, bos, eos, pad, pad],
        [pad] * 8,
    ]
    assert batch.segment_ids.tolist() == [
        [0, 0, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, -1, -1],
        [-1] * 8,
    ]
    assert batch.loss_mask.astype(int).tolist() == [
        [0, 1, 1, 1, 1, 0, 1, 1],
        [0, 1, 1, 1, 0, 1, 0, 0],
        [0] * 8,
    ]
    with pytest.raises(DataError, match="document 0 has 9 tokens"):
        pack_documents([list(range(7))], length=8, specials=SPECIALS)
    with pytest.raises(DataError, match="need 2 rows of 8, got 1"):
        pack_documents([[1, 2, 3, 4], [5, 6, 7]], length=8, specials=SPECIALS, rows=1)
