"""An interpolated n-gram model over token ids: a floor, and the judge of samples in quick runs.

Modified Kneser-Ney smoothing in its interpolated form (Chen & Goodman 1999, "An empirical study of
smoothing techniques for language modeling", eq. 26 and 27), over the closed vocabulary of ids, with
the uniform distribution below the unigrams:

    P_k(w | u) = max(c(uw) - D(c(uw)), 0) / c(u.) + gamma(u) * P_{k-1}(w | u less its oldest id)
    gamma(u)   = (D1 N1(u.) + D2 N2(u.) + D3 N3+(u.)) / c(u.)
    P_0(w)     = 1 / V

At the highest order c is the count; below, the number of distinct ids seen to the left, except for
n-grams that start with BOS, which nothing precedes: these keep their count. A context without
counts passes all its mass down. Hence every distribution sums to one, whatever the context.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError

Sequences = Sequence[ArrayLike]


class _Level(NamedTuple):
    """Statistics of the k-grams: `context id * V + token` sorted, and sums per context id."""

    keys: np.ndarray  # int64 [grams], sorted; the index of a gram is its id as a context above
    discounted: np.ndarray  # float64 [grams], max(c - D(c), 0) / c(context)
    gamma: np.ndarray  # float64 [contexts], weight of the order below; 1 without counts
    counts: np.ndarray  # int64 [grams], c, kept for inspection
    discounts: tuple[float, float, float]


class _Rows(NamedTuple):
    """Sequences on one line: `depth` is the number of ids between BOS and here."""

    tokens: np.ndarray
    depth: np.ndarray
    sequence: np.ndarray
    position: np.ndarray


def _flatten(sequences: Sequences, vocab_size: int, bos_id: int) -> _Rows:
    arrays = [np.asarray(ids).ravel() for ids in sequences]
    if not arrays or not sum(map(len, arrays)):
        raise DataError("an n-gram model needs at least one sequence of ids, got none")
    tokens = np.concatenate(arrays).astype(np.int64)
    lengths = np.array([len(ids) for ids in arrays])
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if wrong.size:
        raise DataError(f"token id {int(wrong[0])} is outside the vocabulary of {vocab_size}")
    first = np.cumsum(lengths) - lengths
    starts = first[lengths > 0]
    if (tokens[starts] != bos_id).any():
        bad = int(np.flatnonzero(tokens[starts] != bos_id)[0])
        raise DataError(
            f"sequence {bad} starts with id {int(tokens[starts[bad]])}, not with BOS ({bos_id})"
        )
    index = np.arange(len(tokens))
    last_bos = np.maximum.accumulate(np.where(tokens == bos_id, index, -1))
    sequence = np.repeat(np.arange(len(arrays)), lengths)
    return _Rows(tokens, index - last_bos, sequence, index - first[sequence])


def _discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Returns D1, D2, D3+ from the counts of counts (Chen & Goodman 1999, eq. 26).

    Where few grams make the formula undefined or leave 0 <= D_c <= c, the usual constants
    0.5, 1 and 1.5 stand in.
    """
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if min(n1, n2, n3):
        y = n1 / (n1 + 2 * n2)
        found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if all(0 <= d <= c for c, d in enumerate(found, start=1)):
            return found
    return (0.5, 1.0, 1.5)


class JudgeScore(NamedTuple):
    """Per sequence: `nats` float64 and the number of `tokens` scored, int64."""

    nats: np.ndarray
    tokens: np.ndarray


class NgramModel:
    """Interpolated modified Kneser-Ney model; immutable once fitted.

    Attributes:
        order: longest n-gram. vocab_size: ids 0..V-1 that share the mass, special ids included.
        bos_id: starts a sequence or a document in it; resets the history and is never scored.
    """

    def __init__(self, order: int, vocab_size: int, bos_id: int, levels: list[_Level]):
        """Use `NgramModel.fit`."""
        self.order, self.vocab_size, self.bos_id = order, vocab_size, bos_id
        self._levels = levels

    @classmethod
    def fit(
        cls, sequences: Sequences, *, vocab_size: int, bos_id: int, order: int = 4
    ) -> "NgramModel":
        """Counts the n-grams of `sequences`.

        Args:
            sequences: integer id vectors, each starting with `bos_id`; for a judge or floor, rows
                cut as the models' training rows are.
            vocab_size: V.
            bos_id: id of BOS.
            order: 1 (unigram) or more.

        Raises:
            DataError: no ids, ids out of range, a sequence without BOS, or nothing after BOS.
            ValueError: `order` below 1.
        """
        if order < 1:
            raise ValueError(f"order must be 1 or more, got {order}")
        tokens, depth, _, _ = _flatten(sequences, vocab_size, bos_id)
        if not (depth > 0).any():
            raise DataError("the sequences hold nothing but BOS")
        # ids[k][i]: the number of the k-gram that ends at i; -1 where k ids do not exist since BOS.
        ids = [np.zeros(len(tokens), np.int64), tokens]
        grams: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for k in range(1, order + 1):
            # A k-gram has k - 1 ids before its last one; a lone BOS is a context, not an event.
            here = np.flatnonzero(depth >= max(k - 1, 1))
            context = ids[k - 1][here - 1] if k > 1 else np.zeros(len(here), np.int64)
            keys, first, inverse, counts = np.unique(
                context * vocab_size + tokens[here],
                return_index=True, return_inverse=True, return_counts=True,
            )  # fmt: skip
            grams.append((keys, here[first], counts))
            if k > 1:
                numbers = np.full(len(tokens), -1, np.int64)
                numbers[here] = inverse
                ids.append(numbers)
            else:
                unigrams = keys
        levels = []
        for k in range(1, order + 1):
            keys, example, counts = grams[k - 1]
            if k < order:
                # Each distinct (k+1)-gram is one id to the left of its k-gram suffix.
                ends = grams[k][1]
                suffix = np.searchsorted(unigrams, tokens[ends]) if k == 1 else ids[k][ends]
                continuation = np.bincount(suffix, minlength=len(keys))
                starts_at_bos = depth[example] == k - 1
                counts = np.where(starts_at_bos, counts, continuation)
            contexts = 1 if k == 1 else vocab_size if k == 2 else len(grams[k - 2][0])
            levels.append(cls._level(keys, counts, keys // vocab_size, contexts))
        return cls(order, vocab_size, bos_id, levels)

    @staticmethod
    def _level(keys: np.ndarray, counts: np.ndarray, context: np.ndarray, contexts: int) -> _Level:
        discounts = _discounts(counts)
        discount = np.asarray((0.0, *discounts))[np.minimum(counts, 3)]
        total = np.bincount(context, weights=counts, minlength=contexts)
        kept = np.bincount(context, weights=discount, minlength=contexts)
        gamma = np.divide(kept, total, out=np.ones(contexts), where=total > 0)
        return _Level(keys, (counts - discount) / total[context], gamma, counts, discounts)

    def _probabilities(self, rows: _Rows) -> np.ndarray:
        """Returns P(token | ids since BOS) at every place, float64; meaningless on BOS itself."""
        probability = np.full(len(rows.tokens), 1 / self.vocab_size)
        context = np.zeros(len(rows.tokens), np.int64)  # id of the (k-1)-gram that ends before here
        for k, level in enumerate(self._levels, start=1):
            known = (context >= 0) & (rows.depth >= max(k - 1, 1))
            where = np.flatnonzero(known)
            key = context[where] * self.vocab_size + rows.tokens[where]
            at = np.minimum(np.searchsorted(level.keys, key), len(level.keys) - 1)
            hit = level.keys[at] == key
            probability[where] = level.gamma[context[where]] * probability[where] + np.where(
                hit, level.discounted[at], 0.0
            )
            if k == 1:
                gram = rows.tokens
            else:
                gram = np.full(len(rows.tokens), -1, np.int64)
                gram[where[hit]] = at[hit]
            context = np.concatenate([[-1], gram[:-1]])
        return probability

    def token_nats(self, sequences: Sequences) -> list[np.ndarray]:
        """Returns -ln P of each id, one float64 vector per sequence; 0 on BOS, which is not scored.

        Raises:
            DataError: ids out of range, or a sequence that does not start with BOS.
        """
        rows = _flatten(sequences, self.vocab_size, self.bos_id)
        nats = np.where(rows.depth > 0, -np.log(self._probabilities(rows)), 0.0)
        lengths = np.bincount(rows.sequence, minlength=len(sequences))
        return np.split(nats, np.cumsum(lengths)[:-1])

    def nats(self, sequences: Sequences, *, score_from: Sequence[int] | None = None) -> JudgeScore:
        """Scores whole sequences, or what follows a prompt.

        Args:
            sequences: id vectors, each starting with BOS.
            score_from: index of the first scored id of each sequence (a prompt's length, BOS
                included); None scores everything after BOS.

        Returns:
            nats and scored tokens per sequence; BOS is never among them.
        """
        starts = [0] * len(sequences) if score_from is None else list(score_from)
        if len(starts) != len(sequences):
            raise ValueError(f"score_from has {len(starts)} values for {len(sequences)} sequences")
        values = self.token_nats(sequences)
        scored = [np.asarray(ids).ravel()[start:] != self.bos_id
                  for ids, start in zip(sequences, starts, strict=True)]  # fmt: skip
        return JudgeScore(
            np.array([v[start:].sum() for v, start in zip(values, starts, strict=True)]),
            np.array([int(mask.sum()) for mask in scored], np.int64),
        )

    def next_token_probabilities(self, context: ArrayLike) -> np.ndarray:
        """Returns P(w | context) for all w in the vocabulary, float64 [V]; it sums to one.

        Computed by scoring all V continuations on the path that scores text.
        """
        context = np.asarray(context, np.int64).ravel()
        candidates = [np.append(context, w) for w in range(self.vocab_size)]
        rows = _flatten(candidates, self.vocab_size, self.bos_id)
        # BOS as a candidate is an ordinary event here: it keeps the depth of its place.
        ends = np.cumsum([len(ids) for ids in candidates]) - 1
        depth = rows.depth.copy()
        depth[ends] = depth[ends - 1] + 1
        return self._probabilities(rows._replace(depth=depth))[ends]

    def describe(self) -> str:
        """Returns one line on what the model is and how large."""
        grams = ", ".join(f"{len(level.keys):,}" for level in self._levels)
        name = "unigram" if self.order == 1 else f"{self.order}-gram"
        return (
            f"token {name}, interpolated modified Kneser-Ney over {self.vocab_size} ids "
            f"(n-grams per order: {grams})"
        )


def perplexity(score: JudgeScore) -> float:
    """Returns exp(sum of nats / sum of tokens) over all sequences.

    Raises:
        ValueError: no token was scored.
    """
    total = int(score.tokens.sum())
    if total == 0:
        raise ValueError("perplexity needs at least one scored token")
    return math.exp(float(score.nats.sum()) / total)
