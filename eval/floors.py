"""Floors: bits per byte that need no neural network, on the same held-out text.

Uniform, unigram and n-gram floors score the same windows of ids as the entries do, from BOS and
without history across windows. The xz floors see the text whole and in order.
"""

import lzma
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from .ngram import NgramModel, Sequences
from .results import Floor
from .statistics import bits_per_byte, bootstrap_bits_per_byte, group_blocks

XZ_DICTIONARY_MAX = 1536 << 20  # bytes; what liblzma allows an encoder


def uniform_bytes_floor() -> Floor:
    """Returns 8 bits per byte: all 256 byte values equally likely."""
    return Floor(
        name="uniform bytes", bits_per_byte=8.0, ci95=None, detail="256 equally likely byte values"
    )


def _windows_floor(
    name: str, nats: np.ndarray, window_bytes: ArrayLike, detail: str, seed: int
) -> Floor:
    sizes = np.asarray(window_bytes, np.int64)
    if sizes.shape != nats.shape:
        raise DataError(f"{len(nats)} windows but byte counts for {sizes.size}")
    blocks = group_blocks(nats, sizes)
    value = bits_per_byte(nats.sum(), int(sizes.sum()))
    return Floor(
        name=name,
        bits_per_byte=value,
        ci95=bootstrap_bits_per_byte(blocks, seed=seed),
        detail=detail,
    )


def uniform_tokens_floor(
    windows: Sequences, window_bytes: ArrayLike, *, vocab_size: int, bos_id: int, seed: int = 0
) -> Floor:
    """Returns the score of equal probability for every id of the vocabulary.

    Args:
        windows: held-out id vectors, each starting with BOS (which is not scored).
        window_bytes: [windows], bytes of text that each window's scored ids spell.
        vocab_size: V, special ids included.
        bos_id: id of BOS.
        seed: of the bootstrap.
    """
    tokens = np.array([int((np.asarray(ids) != bos_id).sum()) for ids in windows])
    return _windows_floor(
        "uniform tokens",
        tokens * math.log(vocab_size),
        window_bytes,
        f"{vocab_size} equally likely ids",
        seed,
    )


def ngram_floor(
    model: NgramModel, windows: Sequences, window_bytes: ArrayLike, *, seed: int = 0
) -> Floor:
    """Returns the score of a fitted n-gram model (order 1: the unigram floor).

    Args:
        model: fitted on the training split.
        windows: held-out id vectors, each starting with BOS.
        window_bytes: [windows], bytes of text that each window's scored ids spell.
        seed: of the bootstrap.
    """
    name = "unigram" if model.order == 1 else f"{model.order}-gram"
    return _windows_floor(name, model.nats(windows).nats, window_bytes, model.describe(), seed)


def xz_size(data: bytes) -> int:
    """Returns the size in bytes of `xz -9e` of `data`, container included.

    The dictionary always holds all of the data (xz -9 stops at 64 MiB); for shorter data a smaller
    one that still holds all gives the same stream with far less memory.

    Raises:
        DataError: the data are larger than the largest dictionary.
    """
    if len(data) > XZ_DICTIONARY_MAX:
        raise DataError(
            f"xz floor: {len(data)} bytes exceed the largest dictionary of {XZ_DICTIONARY_MAX}"
        )
    dictionary = min(max(1 << 16, 1 << (len(data) - 1).bit_length()), XZ_DICTIONARY_MAX)
    filters = [
        {
            "id": lzma.FILTER_LZMA2,
            "preset": 9 | lzma.PRESET_EXTREME,
            "dict_size": dictionary,
        }
    ]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))


def xz_floors(train_documents: Sequence[bytes], test: bytes) -> tuple[Floor, Floor]:
    """Returns the xz floors of `test`: alone, and given the training text.

    The conditional floor is (size(train + test) - size(train)) * 8 / bytes, the training documents
    joined without a separator in the order given; pass them sorted by name so that the figure can
    be repeated (the order moves it by about 0.001 bits per byte).

    Args:
        train_documents: the training texts, in a stated order.
        test: the held-out text.

    Raises:
        DataError: no held-out text, or the texts are too large.
    """
    if not test:
        raise DataError("xz floor: the held-out text is empty")
    train = b"".join(train_documents)
    # Compression releases the interpreter lock; two workers halve the wait on two cores.
    with ThreadPoolExecutor(max_workers=2) as pool:
        both, given, alone = pool.map(xz_size, [train + test, train, test])
    return (
        Floor(
            name="xz",
            bits_per_byte=alone * 8 / len(test),
            ci95=None,
            detail="xz -9e of the held-out text alone",
        ),
        Floor(
            name="xz given training text",
            bits_per_byte=(both - given) * 8 / len(test),
            ci95=None,
            detail=f"xz -9e: size(training + held-out) - size(training), {len(train_documents)} "
            "training texts joined in the order of their names, dictionary over all of it",
        ),
    )


def all_floors(
    *,
    train_sequences: Sequences,
    windows: Sequences,
    window_bytes: ArrayLike,
    train_documents: Sequence[bytes],
    test: bytes,
    vocab_size: int,
    bos_id: int,
    ngram: NgramModel | None = None,
    order: int = 4,
    seed: int = 0,
) -> list[Floor]:
    """Returns all floors, weakest first: uniform bytes and tokens, unigram, n-gram, xz twice.

    Args:
        train_sequences: training id vectors, each starting with BOS, cut as the models' rows are.
        windows: held-out id vectors, each starting with BOS: those that the entries score.
        window_bytes: [windows], bytes that each window's scored ids spell.
        train_documents: training texts in UTF-8, in the order of their names.
        test: the held-out text; its length must be the sum of `window_bytes`.
        vocab_size: V, special ids included.
        bos_id: id of BOS.
        ngram: a model already fitted on `train_sequences` (the judge), to spare a second fit.
        order: of the n-gram when `ngram` is None.
        seed: of the bootstrap.

    Raises:
        DataError: the windows do not spell the held-out text, or the input is empty or malformed.
    """
    scored = int(np.asarray(window_bytes, np.int64).sum())
    if scored != len(test):
        raise DataError(
            f"the windows spell {scored} bytes but the held-out text has {len(test)}: the floors "
            "would not be comparable"
        )
    unigram = NgramModel.fit(train_sequences, vocab_size=vocab_size, bos_id=bos_id, order=1)
    if ngram is None:
        ngram = NgramModel.fit(train_sequences, vocab_size=vocab_size, bos_id=bos_id, order=order)
    xz, xz_given = xz_floors(train_documents, test)
    return [
        uniform_bytes_floor(),
        uniform_tokens_floor(
            windows, window_bytes, vocab_size=vocab_size, bos_id=bos_id, seed=seed
        ),
        ngram_floor(unigram, windows, window_bytes, seed=seed),
        ngram_floor(ngram, windows, window_bytes, seed=seed),
        xz,
        xz_given,
    ]
