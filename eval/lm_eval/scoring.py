"""Log-likelihoods of continuations given contexts, in batches of few compiled shapes.

Exact where the paradigm predicts token after token. Masked diffusion has a bound, estimated with
draws that depend on the ids and the seed alone: neither batch size, order nor `--limit` moves them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...errors import ConfigError
from ...paradigms.interface import Paradigm
from ...paradigms.model import Model
from .forward import score_causal, score_choices, score_hidden

AUTO = "auto"
AUTO_TOKENS = 8192  # of a batch, padding included, where the batch size is "auto"
AUTO_ROWS = 64
SMALLEST_WIDTH = 16  # tokens
CHOICES = 8  # single tokens behind one context that share a row
Item = TypeVar("Item")


class Pair(NamedTuple):
    """A question: how likely is `continuation` behind `context`, which has at least one id."""

    context: Sequence[int]
    continuation: Sequence[int]


class Scored(NamedTuple):
    """An answer.

    Attributes:
        log_likelihood: nats; of a bound, its estimate.
        greedy: True when every token is the most probable one in its place. In diffusion: when all
            of the continuation is hidden, and predicted in one call.
        variance: of the estimate, nats^2; 0 where it is exact.
    """

    log_likelihood: float
    greedy: bool
    variance: float


class _Row(NamedTuple):
    """One row of a batch: `tokens`, which of them to score, and what its value counts for."""

    window: int
    draw: int
    tokens: list[int]
    scored: np.ndarray
    weight: float


class Scorer:
    """Scores pairs of ids with one model.

    Attributes:
        max_len: ids that the model may take in at once.
        draws: noise levels for a pair; 0 where the likelihood is exact.
        seed: of the draws.
    """

    def __init__(
        self,
        model: Model,
        paradigm: Paradigm,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_len: int | None = None,
        draws: int | None = None,
        seed: int = 0,
    ) -> None:
        """Takes a model ready to compute.

        Args:
            model: see `Model.prepare`.
            paradigm: what it was trained for.
            batch_size: rows of a call; "auto" for as many as fill `AUTO_TOKENS` at each width.
            max_batch_size: at most so many rows of "auto"; None for `AUTO_ROWS`.
            max_len: less context than the model can take; None for all of it.
            draws: of a bound, an even number; None for the paradigm's own.
            seed: of the draws.

        Raises:
            ConfigError: a number is out of range, or of no use to this paradigm.
        """
        whole = model.config.max_len
        self.max_len = whole if max_len is None else _number("max_length", max_len, 2, whole)
        self.seed = _number("seed", seed, 0)
        self._batch_size = batch_size
        if batch_size == AUTO:
            self._most = _number("max_batch_size", AUTO_ROWS if max_batch_size is None
                                 else max_batch_size, 1)  # fmt: skip
        else:
            self._batch_size = _number("batch_size", batch_size, 1)
            if max_batch_size is not None:
                raise ConfigError(
                    f"max_batch_size {max_batch_size}: is for batch_size=auto, got {batch_size}"
                )
        self._causal = paradigm.name == "autoregressive"
        if not self._causal and paradigm.name != "masked_diffusion":
            raise ConfigError(f"paradigm {paradigm.name!r}: has no likelihood of a continuation")
        self.draws = 0
        if not self._causal:
            self.draws = _number("draws", paradigm.draws if draws is None else draws, 2)
            if self.draws % 2:
                raise ConfigError(f"draws: got {draws}, want an even number (two to a stratum)")
        elif draws is not None:
            raise ConfigError(
                f"draws {draws}: the likelihood of an {paradigm.name} run is exact; leave it out"
            )
        self._model, self._paradigm = model, paradigm

    def score(
        self, pairs: Sequence[Pair], progress: Callable[[int, Scored], None] | None = None
    ) -> list[Scored]:
        """Scores every pair.

        A pair that is longer than the model loses the beginning of its context. A continuation
        that is longer by itself is scored in windows, every token once (see `windows`).

        Args:
            pairs: contexts of at least one id.
            progress: called as progress(number of the pair, its score) when one is done.

        Returns:
            Scores in the order of the pairs.
        """
        # Diffusion sees the last token too; autoregression only predicts it.
        limit = self.max_len if self._causal else self.max_len - 1
        owners: list[int] = []
        parts: list[Pair] = []
        for number, pair in enumerate(pairs):
            cut = windows(pair, limit)
            owners += [number] * len(cut)
            parts += cut
        missing = np.bincount(owners, minlength=len(pairs))
        totals = [Scored(0.0, True, 0.0)] * len(pairs)
        done: list[Scored | None] = [None] * len(pairs)

        def finish(number: int, score: Scored) -> None:
            totals[number] = _sum(totals[number], score)
            missing[number] -= 1
            if missing[number] <= 0:
                done[number] = totals[number]
                if progress is not None:
                    progress(number, totals[number])

        for number in np.flatnonzero(missing == 0):
            finish(int(number), Scored(0.0, True, 0.0))  # nothing to score
        widths = [self._width(len(part.context) + len(part.continuation)) for part in parts]
        for width in sorted(set(widths), reverse=True):
            chosen = [index for index, own in enumerate(widths) if own == width]
            several = [index for index in chosen if len(parts[index].continuation) > 1]
            single = [index for index in chosen if len(parts[index].continuation) == 1]
            for index, score in self._score_several(parts, several, width):
                finish(owners[index], score)
            for index, score in self._score_single(parts, single, width):
                finish(owners[index], score)
        assert all(score is not None for score in done)
        return done  # type: ignore[return-value]

    def rows_per_batch(self, width: int) -> int:
        """Rows of a batch of this width."""
        if self._batch_size != AUTO:
            return int(self._batch_size)
        return max(1, min(self._most, AUTO_TOKENS // width))

    def _width(self, length: int) -> int:
        """Columns for a row: 16, 24, 32, 48, 64, ... so that few shapes are compiled."""
        length -= 1 if self._causal else 0  # the last token is only predicted
        width = SMALLEST_WIDTH
        while width < length:
            width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
        return min(width, self.max_len)

    def _score_single(
        self, parts: Sequence[Pair], chosen: Sequence[int], width: int
    ) -> Iterator[tuple[int, Scored]]:
        """Yields (index of the part, its score) for parts of one width and one token.

        Those with the same context share a row, as the letters of a question's answers do. In
        diffusion nothing is drawn: the one token is hidden.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in chosen:
            groups.setdefault(tuple(parts[index].context), []).append(index)
        rows = [
            own[i : i + CHOICES] for own in groups.values() for i in range(0, len(own), CHOICES)
        ]
        count = self.rows_per_batch(width)
        hidden_place = [] if self._causal else [self._paradigm.mask_id]
        paradigm = None if self._causal else self._paradigm
        for batch in _batched(iter(rows), count):
            tokens, lengths = np.zeros((count, width), np.int32), np.ones((count,), np.int32)
            if not self._causal:
                lengths += 1  # the rows that only fill the batch need a place before the last
            choices = np.zeros((count, CHOICES), np.int32)
            for number, own in enumerate(batch):
                ids = [*parts[own[0]].context, *hidden_place]
                lengths[number], tokens[number, : len(ids)] = len(ids), ids
                choices[number, : len(own)] = [parts[index].continuation[0] for index in own]
            found, best = score_choices(self._model, tokens, choices, lengths, paradigm=paradigm)
            found, best = np.asarray(found), np.asarray(best)
            for number, own in enumerate(batch):
                for place, index in enumerate(own):
                    greedy = bool(best[number] == choices[number, place])
                    yield index, Scored(float(found[number, place]), greedy, 0.0)

    def _score_several(
        self, parts: Sequence[Pair], chosen: Sequence[int], width: int
    ) -> Iterator[tuple[int, Scored]]:
        """Yields (index of the part, its score) for parts of one width and several tokens."""
        values: dict[int, list[float]] = {}
        greedy: dict[int, bool] = {}
        wanted: dict[int, int] = {}

        def rows() -> Iterator[_Row]:
            for index in chosen:
                own = list(self._rows_of(index, parts[index]))
                wanted[index], values[index] = len(own), []
                yield from own

        for batch in _batched(rows(), self.rows_per_batch(width)):
            for row, (value, best) in zip(batch, self._run(batch, width), strict=False):
                index = row.window
                if row.draw < 0:
                    greedy[index] = best
                if row.weight:
                    values[index].append(row.weight * value)
                wanted[index] -= 1
                if wanted[index] == 0:
                    yield index, _estimate(values.pop(index), greedy.pop(index))

    def _rows_of(self, index: int, pair: Pair) -> Iterator[_Row]:
        """The rows that a part needs; the one of draw -1 says whether it is greedy."""
        tokens = [*pair.context, *pair.continuation]
        begin, count = len(pair.context), len(pair.continuation)
        if self._causal:
            scored = np.arange(len(tokens) - 1) >= begin - 1
            yield _Row(index, -1, tokens, scored, 1.0)
            return
        yield _Row(index, -1, tokens, np.arange(len(tokens)) >= begin, 0.0)
        draw = _generator(self.seed, pair)
        for number in range(self.draws):
            level = (number // 2 + draw.random()) / (self.draws // 2)
            hidden = min(int(level * count) + 1, count)
            scored = np.zeros(len(tokens), bool)
            scored[begin + draw.permutation(count)[:hidden]] = True
            yield _Row(index, number, tokens, scored, count / hidden)

    def _run(self, batch: Sequence[_Row], width: int) -> list[tuple[float, bool]]:
        """Computes a batch: for each row the log-likelihood of what is scored, and if greedy."""
        shape = (self.rows_per_batch(width), width)
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        scored, lengths = np.zeros(shape, bool), np.ones(shape[:1], np.int32)
        for number, row in enumerate(batch):
            inputs = row.tokens[:-1] if self._causal else row.tokens
            lengths[number] = len(inputs)
            tokens[number, : len(inputs)] = inputs
            targets[number, : len(inputs)] = row.tokens[1:] if self._causal else row.tokens
            scored[number, : len(inputs)] = row.scored
        function = score_causal if self._causal else score_hidden
        paradigm = None if self._causal else self._paradigm
        found, best = function(self._model, tokens, targets, scored, lengths, paradigm=paradigm)
        return list(zip(np.asarray(found).tolist(), np.asarray(best).tolist(), strict=True))


def windows(pair: Pair, limit: int) -> list[Pair]:
    """Cuts a pair into pairs of at most `limit` + 1 ids that score each token once.

    One is enough where the continuation has up to `limit` ids: the context's beginning is cut off.
    Longer ones are cut into pieces of `limit`; the last piece gets all the context that fits.

    Args:
        pair: its context has at least one id.
        limit: ids that the model takes in to predict the next.
    """
    ids, begin = [*pair.context, *pair.continuation], len(pair.context)
    parts = []
    start = begin
    while start < len(ids):
        end = min(start + limit, len(ids))
        parts.append(Pair(ids[max(0, end - limit - 1) : start], ids[start:end]))
        start = end
    return parts


def _estimate(values: Sequence[float], greedy: bool) -> Scored:
    """The mean over draws, which come in pairs, and its variance."""
    drawn = np.array(values)
    if len(drawn) == 1:
        return Scored(float(drawn[0]), greedy, 0.0)
    variance = float(((drawn[0::2] - drawn[1::2]) ** 2).sum() / len(drawn) ** 2)
    return Scored(float(drawn.mean()), greedy, variance)


def _sum(one: Scored, other: Scored) -> Scored:
    return Scored(
        one.log_likelihood + other.log_likelihood,
        one.greedy and other.greedy,
        one.variance + other.variance,
    )


def _generator(seed: int, pair: Pair) -> np.random.Generator:
    """The source of a pair's draws."""
    text = repr((seed, [int(i) for i in pair.context], [int(i) for i in pair.continuation]))
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _batched(rows: Iterator[Item], size: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns a whole number; text of one is read, as command lines give it.

    Raises:
        ConfigError: it is none, or out of range.
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (most is not None and value > most)
    ):
        extent = f"of at least {least}" if most is None else f"from {least} to {most}"
        auto = " or 'auto'" if name == "batch_size" else ""
        raise ConfigError(f"{name}: got {value!r}, want a whole number {extent}{auto}")
    return value
