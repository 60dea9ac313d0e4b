"""Evaluation windows: every token once, every byte once."""

import dataclasses

import numpy as np
import pytest
from genlab.errors import DataError
from genlab.train.data.tokenizer import BytesTokenizer
from genlab.train.data.windows import EvaluationWindows
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import TEXTS, make_store

BYTES = BytesTokenizer()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    length=st.integers(2, 12),
    batch_size=st.integers(1, 4),
)
def test_every_token_is_scored_once(lengths, length, batch_size):
    store = make_store(lengths, split="test")
    windows = EvaluationWindows(store, BYTES, length=length)
    scored, seen = [], []
    for indices, batch in windows.batches(batch_size):
        assert batch.tokens.shape == (batch_size, length)
        assert (batch.tokens.dtype, batch.segment_ids.dtype) == (np.int32, np.int32)
        seen += indices[indices >= 0].tolist()
        for index, tokens, segments, mask in zip(indices, *batch, strict=True):
            if index < 0:
                assert (segments == -1).all() and not mask.any() and (tokens == BYTES.pad_id).all()
                continue
            count = windows.token_counts[index]
            assert mask.sum() == count and mask[1 : count + 1].all()
            assert tokens[0] == BYTES.bos_id
            assert (segments[: count + 1] == 0).all() and (segments[count + 1 :] == -1).all()
            assert (tokens[count + 1 :] == BYTES.pad_id).all()
            assert windows.byte_counts[index] == count  # a token is a byte here
            scored += tokens[mask].tolist()
    assert seen == list(range(len(windows)))
    assert scored == store.tokens.tolist()
    assert windows.complete and windows.total_bytes == store.num_bytes


def test_windows_never_cross_documents(store_of):
    windows = EvaluationWindows(store_of([10, 3, 8]), BYTES, length=5)
    assert windows.documents.tolist() == [0, 0, 0, 1, 2, 2]
    assert windows.token_counts.tolist() == [4, 4, 2, 3, 4, 4]


def test_bytes_of_multi_byte_tokens_add_up(bpe, store_of):
    texts = [TEXTS[0] + " \u4f60\u597d", "", TEXTS[1]]
    ids = [bpe.encode(t) for t in texts]
    store = dataclasses.replace(
        store_of([len(i) for i in ids], split="test"),
        tokens=np.concatenate(ids).astype(np.uint16),
        byte_counts=np.array([len(t.encode()) for t in texts]),
        specials=bpe.specials,
    )
    for length in (2, 7, 500):
        windows = EvaluationWindows(store, bpe, length=length)
        assert windows.total_bytes == sum(len(t.encode()) for t in texts)
        assert windows.token_counts.sum() == sum(map(len, ids))
        for index in range(len(windows)):
            batch = windows.rows([index])
            text = bpe.decode_bytes(batch.tokens[batch.loss_mask])
            assert windows.byte_counts[index] == len(text)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_bytes_are_the_texts_even_for_a_lossy_tokenizer(store_of, factor):
    """Tokens that stand for more or fewer bytes than the text has leave the sum exact."""
    store = store_of([10, 0, 7], split="test")
    counts = np.array([int(10 * factor), 3, int(7 * factor)])
    windows = EvaluationWindows(dataclasses.replace(store, byte_counts=counts), BYTES, length=4)
    assert (windows.byte_counts >= 0).all()
    sums = np.bincount(windows.documents, windows.byte_counts)
    assert sums.tolist() == counts.tolist()


def test_cap_is_even_and_deterministic(store_of):
    store = store_of([100, 100], split="test")
    whole = EvaluationWindows(store, BYTES, length=11)
    capped = EvaluationWindows(store, BYTES, length=11, max_windows=4)
    assert (len(whole), len(capped), capped.total_windows) == (20, 4, 20)
    assert not capped.complete
    assert capped.starts.tolist() == [20, 70, 120, 170]
    assert capped.total_bytes == 40
    everything = EvaluationWindows(store, BYTES, length=11, max_windows=20)
    assert everything.complete and len(everything) == 20


def test_refusals(store_of, bpe):
    with pytest.raises(DataError, match="test split is empty"):
        EvaluationWindows(store_of([], split="test"), BYTES, length=8)
    with pytest.raises(DataError, match="another tokenizer"):
        EvaluationWindows(store_of([8]), bpe, length=8)
    with pytest.raises(DataError, match="max_windows"):
        EvaluationWindows(store_of([8]), BYTES, length=8, max_windows=0)
    with pytest.raises(DataError, match="length 1"):
        EvaluationWindows(store_of([8]), BYTES, length=1)
