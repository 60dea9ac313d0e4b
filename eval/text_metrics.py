"""Quality of generated samples, counted on ids as generated (never on re-encoded text).

Generative perplexity alone rewards repetition: a text of one token is very predictable. It is
therefore always reported with entropy and distinct-n, and samples that repeat themselves are
flagged.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from .ngram import JudgeScore, perplexity

# A sample repeats itself when a measure falls below this share of that of real text of its length.
REPETITION_SHARE = 0.5


class Judge(Protocol):
    """Scores ids; fitted or trained apart from every compared entry."""

    def nats(
        self, sequences: Sequence[ArrayLike], *, score_from: Sequence[int] | None = None
    ) -> JudgeScore:
        """Returns nats and scored tokens per sequence; each sequence starts with BOS."""
        ...


class GenerativePerplexity(NamedTuple):
    """`gen_ppl` = exp(nats / tokens) under the judge, over all samples together."""

    gen_ppl: float
    nats: float
    tokens: int


def generative_perplexity(
    judge: Judge, samples: Sequence[ArrayLike], *, score_from: Sequence[int] | None = None
) -> GenerativePerplexity:
    """Returns the judge's perplexity of the generated ids.

    Args:
        judge: never a compared entry.
        samples: integer id vectors, each starting with BOS, prompt included.
        score_from: index of the first generated id per sample (the prompt is context, not scored);
            None scores everything after BOS.

    Raises:
        ValueError: no generated token.
    """
    score = judge.nats(samples, score_from=score_from)
    return GenerativePerplexity(perplexity(score), float(score.nats.sum()), int(score.tokens.sum()))


def sequence_entropy(ids: ArrayLike) -> float:
    """Returns the unigram entropy of one sequence's own id frequencies, nats.

    Between 0 (one id only) and ln(length).

    Raises:
        ValueError: the sequence is empty.
    """
    counts = np.unique(np.asarray(ids).ravel(), return_counts=True)[1]
    if not counts.size:
        raise ValueError("the entropy of an empty sample is not defined")
    shares = counts / counts.sum()
    return float(max(0.0, -(shares * np.log(shares)).sum()))


def token_entropy(samples: Sequence[ArrayLike]) -> float:
    """Returns the mean over samples of `sequence_entropy`, nats; pass generated ids without BOS.

    It depends on the samples' length: compare equal lengths only.

    Raises:
        ValueError: no sample, or an empty one.
    """
    if not len(samples):
        raise ValueError("the entropy of no samples is not defined")
    return float(np.mean([sequence_entropy(ids) for ids in samples]))


def distinct_n(samples: Sequence[ArrayLike], n: int) -> float | None:
    """Returns distinct n-grams / all n-grams, pooled over the samples; None if none has n ids.

    An n-gram never spans two samples. Depends on the amount of text: compare equal amounts only.

    Args:
        samples: integer id vectors without BOS.
        n: 1 or more.
    """
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    arrays = [np.asarray(ids).ravel() for ids in samples]
    grams = [np.lib.stride_tricks.sliding_window_view(ids, n) for ids in arrays if len(ids) >= n]
    if not grams:
        return None
    pooled = np.concatenate(grams)
    return len(np.unique(pooled, axis=0)) / len(pooled)


class Repetition(NamedTuple):
    """Whether samples repeat themselves.

    Attributes:
        repetitive: at least half of the samples are flagged.
        flagged: per sample.
        reference_entropy, reference_distinct_2: means over real text cut to the samples' lengths.
        detail: one line for the report.
    """

    repetitive: bool
    flagged: tuple[bool, ...]
    reference_entropy: float
    reference_distinct_2: float
    detail: str


def repetition(samples: Sequence[ArrayLike], reference: ArrayLike) -> Repetition:
    """Flags samples whose entropy or distinct-2 is below half of real text's at equal length.

    "aaaa..." has a low perplexity and entropy 0; "the same sentence, the same sentence" keeps some
    entropy but has few distinct bigrams.

    Args:
        samples: integer id vectors without BOS, each of at least two ids.
        reference: held-out ids without BOS, longer than the longest sample.

    Raises:
        ValueError: a sample is too short, or the reference is.
    """
    arrays = [np.asarray(ids).ravel() for ids in samples]
    real = np.asarray(reference).ravel()
    if not arrays or min(map(len, arrays)) < 2:
        raise ValueError("repetition needs samples of at least two ids")
    if len(real) < max(map(len, arrays)):
        raise ValueError(f"the reference has {len(real)} ids, a sample {max(map(len, arrays))}")
    measured: dict[int, tuple[float, float]] = {}
    for length in {len(ids) for ids in arrays}:
        starts = np.linspace(0, len(real) - length, num=min(64, len(real) // length), dtype=int)
        pieces = [real[start : start + length] for start in starts]
        measured[length] = (
            float(np.mean([sequence_entropy(piece) for piece in pieces])),
            float(np.mean([distinct_n([piece], 2) for piece in pieces])),
        )
    flagged = []
    for ids in arrays:
        entropy, distinct = measured[len(ids)]
        flagged.append(
            sequence_entropy(ids) < REPETITION_SHARE * entropy
            or distinct_n([ids], 2) < REPETITION_SHARE * distinct
        )
    references = [measured[len(ids)] for ids in arrays]
    count = sum(flagged)
    return Repetition(
        repetitive=2 * count >= len(arrays),
        flagged=tuple(flagged),
        reference_entropy=float(np.mean([entropy for entropy, _ in references])),
        reference_distinct_2=float(np.mean([distinct for _, distinct in references])),
        detail=f"{count} of {len(arrays)} samples have an entropy or distinct-2 below half of that "
        "of held-out text of the same length",
    )


_APOSTROPHES = "'\u2019"
_WORD = re.compile(rf"[^\W\d_]+(?:[{_APOSTROPHES}][^\W\d_]+)*")


def words(text: str) -> list[str]:
    """Returns the runs of letters in lower case, apostrophes inside kept."""
    return [word.lower() for word in _WORD.findall(text)]


def training_words(texts: Iterable[str]) -> frozenset[str]:
    """Returns the set of words of the training text."""
    return frozenset(word for text in texts for word in words(text))


def word_rate(texts: Sequence[str], vocabulary: frozenset[str]) -> float | None:
    """Returns the share of the samples' words that occur in the training text.

    A last word that runs into the end of a sample may have been cut by the length limit and is left
    out.

    Returns:
        a value in [0, 1], or None when the samples hold no whole word.
    """
    found = total = 0
    for text in texts:
        sample = words(text)
        if sample and (text[-1].isalpha() or text[-1] in _APOSTROPHES):
            sample = sample[:-1]
        total += len(sample)
        found += sum(word in vocabulary for word in sample)
    return found / total if total else None
