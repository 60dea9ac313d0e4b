"""Held-out likelihood in windows longer than the rows of training, over one and the same text."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...paradigms.interface import Batch
from ...paradigms.model import Model
from ...train.data.pipeline import Data
from .records import LongContextPoint

TOKENS_PER_CALL = 4096


def regions(data: Data, length: int, count: int) -> NDArray[np.int64]:
    """Starts of `count` stretches of `length` tokens in the test split, each inside a document.

    Stretches do not overlap, and are spread evenly over those that fit.

    Raises:
        DataError: fewer than `count` fit.
    """
    offsets = data.test.offsets
    starts = np.concatenate(
        [np.arange(begin, end - length + 1, length) for begin, end in pairwise(offsets)]
        or [np.zeros(0, np.int64)]
    )
    if len(starts) < count:
        raise DataError(
            f"long_context: only {len(starts)} stretches of {length} tokens lie within documents "
            f"of the test split, {count} were asked for"
        )
    return starts[(2 * np.arange(count) + 1) * len(starts) // (2 * count)]


def windows_of(
    data: Data, starts: NDArray[np.int64], span: int, length: int
) -> tuple[NDArray[np.int32], int]:
    """Cuts each stretch of `span` tokens into windows of BOS and length - 1 tokens.

    Returns:
        int32 (windows, length), and the bytes of text that they hold.

    Raises:
        ValueError: length - 1 does not divide `span`.
    """
    content = length - 1
    if span % content:
        raise ValueError(f"{content} tokens per window do not divide a stretch of {span}")
    ids = np.stack([data.test.tokens[s : s + span] for s in starts]).astype(np.int32)
    rows = ids.reshape(-1, content)
    bos = np.full((len(rows), 1), data.tokenizer.specials.bos, np.int32)
    return np.concatenate([bos, rows], axis=1), int(data.tokenizer.byte_lengths()[ids].sum())


def measure_long_context(
    model: Model,
    paradigm: Any,
    data: Data,
    multiples: Sequence[int],
    *,
    count: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[LongContextPoint]:
    """Scores the same stretches of held-out text in windows of growing length.

    Nothing is carried between windows: a longer window gives the model more to look back on, and
    asks it to work at distances that it was not trained at.

    Args:
        model: ready to compute.
        paradigm: has the likelihood.
        data: its test split is scored.
        multiples: of the context length trained at; each divides the largest.
        count: stretches of the largest length.
        seed: of the draws of bounds.
        progress: called as progress(done, total).

    Raises:
        DataError: the test split has too few documents of that length.
        FloatingPointError: a likelihood is not finite.
    """
    trained = data.config.context_length
    content = trained - 1
    span = content * max(multiples)
    starts = regions(data, span, count)
    key = jax.random.key(seed)
    points = []
    for done, multiple in enumerate(multiples):
        progress(done, len(multiples))
        length = content * multiple + 1
        longer = model.with_max_len(max(length, model.config.max_len))
        rows, num_bytes = windows_of(data, starts, span, length)
        per_call = max(1, min(TOKENS_PER_CALL // length, len(rows)))
        nats = 0.0
        for number, at in enumerate(range(0, len(rows), per_call)):
            part = rows[at : at + per_call]
            missing = per_call - len(part)
            part = np.pad(part, ((0, missing), (0, 0)))
            real = np.arange(per_call)[:, None] < per_call - missing
            segments = np.where(np.broadcast_to(real, part.shape), 0, -1).astype(np.int32)
            scored = (segments >= 0) & (np.arange(length) > 0)
            batch = Batch(part, segments, scored)
            result = _score(longer, batch, jax.random.fold_in(key, number), paradigm=paradigm)
            nats += float(np.asarray(result.nll_nats, np.float64)[: per_call - missing].sum())
        if not math.isfinite(nats):
            raise FloatingPointError(f"windows of {length} tokens: nll is {nats}")
        points.append(
            LongContextPoint(
                length=length,
                multiple=float(multiple),
                bits_per_byte=nats / (math.log(2) * num_bytes),
                bytes=num_bytes,
            )
        )
    progress(len(multiples), len(multiples))
    return points


def _log_likelihood(model: Model, batch: Batch, key: jax.Array, *, paradigm: Any) -> Any:
    return paradigm.log_likelihood(model, batch, key=key)


_score = jax.jit(_log_likelihood, static_argnames=("paradigm",))
