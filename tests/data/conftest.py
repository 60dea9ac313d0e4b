"""Small stores and tokenizers that the tests of the data layer share."""

import numpy as np
import pytest
from genlab.train.data.store import TokenStore
from genlab.train.data.tokenizer import BytesTokenizer, SpecialIds, Tokenizer
from genlab.train.data.tokenizer_config import BPETokenizerConfig

TEXTS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "must be in want of a wife. However little known the feelings or views of such a man may be",
    "on his first entering a neighbourhood, this truth is so well fixed in the minds of the",
    "surrounding families, that he is considered the rightful property of some one or other.",
]


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """Byte-level BPE with a few merges."""
    return BPETokenizerConfig(vocab_size=300).build(TEXTS)


def make_store(lengths, *, split="train", seed=0) -> TokenStore:
    """A store of random byte tokens, one byte each."""
    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
    tokens = draw.integers(0, 256, offsets[-1]).astype(np.uint16)
    names = tuple(f"d{i}" for i in range(len(lengths)))
    specials: SpecialIds = BytesTokenizer().specials
    return TokenStore(tokens, offsets, np.diff(offsets), names, specials, split)


@pytest.fixture
def store_of():
    """The function `make_store`."""
    return make_store
