"""Bits per byte with intervals, and latency summaries from arrival times.

Intervals are percentile bootstraps over blocks of consecutive windows: neighbouring windows share
topic and names, so single windows would give intervals that are too narrow.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

BLOCK_BYTES = 2048  # least bytes per bootstrap block
MIN_BLOCKS = 8  # with fewer the percentiles say more about the block count than about the text
RESAMPLES = 4000


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Returns nats / (ln 2 * bytes).

    Args:
        nats: negative log-likelihood summed over the scored tokens, natural logarithm.
        num_bytes: UTF-8 bytes of the text that exactly those tokens spell.

    Raises:
        ValueError: no bytes were scored.
    """
    if num_bytes <= 0:
        raise ValueError(f"bits per byte needs scored bytes, got {num_bytes}")
    return float(nats) / (math.log(2) * num_bytes)


class Blocks(NamedTuple):
    """Sums over consecutive windows, each of at least `BLOCK_BYTES` bytes (float64, int64)."""

    nats: np.ndarray
    num_bytes: np.ndarray


def group_blocks(
    nats: ArrayLike, num_bytes: ArrayLike, *, block_bytes: int = BLOCK_BYTES
) -> Blocks:
    """Groups windows in text order into blocks of at least `block_bytes` bytes.

    A rest that is too short joins the last full block, so no byte is lost and none counts twice.

    Args:
        nats: [windows], nats per window.
        num_bytes: [windows], bytes per window.
        block_bytes: least size of a block, bytes.

    Raises:
        ValueError: the lengths differ, or there is no window.
    """
    nats = np.asarray(nats, np.float64)
    num_bytes = np.asarray(num_bytes, np.int64)
    if nats.shape != num_bytes.shape or nats.ndim != 1 or nats.size == 0:
        raise ValueError(f"want equal non-empty vectors, got {nats.shape} and {num_bytes.shape}")
    block = np.zeros(nats.size, np.int64)
    current, filled = 0, 0
    for index, size in enumerate(num_bytes):
        block[index] = current
        filled += int(size)
        if filled >= block_bytes:
            current, filled = current + 1, 0
    if filled and current:
        block[block == current] = current - 1
    count = int(block.max()) + 1
    sizes = np.zeros(count, np.int64)
    np.add.at(sizes, block, num_bytes)
    return Blocks(np.bincount(block, weights=nats, minlength=count), sizes)


class Interval(NamedTuple):
    """A percentile interval; `low <= high`."""

    low: float
    high: float


def _resample(values: np.ndarray, sizes: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """Returns [resamples] ratios sum(values)/sum(sizes) over blocks drawn with replacement."""
    if resamples < 2000:
        raise ValueError(f"a percentile interval needs 2000 or more resamples, got {resamples}")
    times = _times_drawn(len(sizes), seed, resamples)
    return (times @ values) / (times @ sizes)


@functools.lru_cache(maxsize=1)  # entries of one comparison share the blocks
def _times_drawn(count: int, seed: int, resamples: int) -> np.ndarray:
    """Returns [resamples, count]: how often each block was drawn, float64."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), resamples).astype(np.float64)


def _percentiles(ratios: np.ndarray, confidence: float) -> Interval:
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(float(low), float(high))


def bootstrap_bits_per_byte(
    blocks: Blocks, *, seed: int = 0, resamples: int = RESAMPLES, confidence: float = 0.95
) -> Interval | None:
    """Returns the percentile interval of bits per byte over resampled blocks.

    Covers the text's variation and, for a bound estimated by draws, the draws' noise within the
    blocks as well; it does not cover other training seeds.

    Returns:
        the interval, or None when there are fewer than `MIN_BLOCKS` blocks (see
        `too_few_blocks`).
    """
    if len(blocks.nats) < MIN_BLOCKS:
        return None
    ratios = _resample(blocks.nats, blocks.num_bytes.astype(np.float64), seed, resamples)
    return _percentiles(ratios / math.log(2), confidence)


def paired_difference(
    nats: ArrayLike,
    other_nats: ArrayLike,
    num_bytes: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Interval | None:
    """Returns the interval of (first minus second) bits per byte on the same blocks.

    Both entries read the same text, so hard blocks are hard for both; their difference is known
    much better than either value. Zero inside the interval: the text does not tell them apart.

    Args:
        nats: [blocks], nats per block of the first entry.
        other_nats: [blocks], nats per block of the second.
        num_bytes: [blocks], bytes of each block, shared by both.
        seed: of the resampling.
        resamples: 2000 or more.
        confidence: share of the resamples inside.

    Returns:
        the interval, or None with fewer than `MIN_BLOCKS` blocks.
    """
    difference = np.asarray(nats, np.float64) - np.asarray(other_nats, np.float64)
    sizes = np.asarray(num_bytes, np.float64)
    if difference.shape != sizes.shape:
        raise ValueError(f"blocks differ: {difference.shape} and {sizes.shape}")
    if difference.size < MIN_BLOCKS:
        return None
    return _percentiles(_resample(difference, sizes, seed, resamples) / math.log(2), confidence)


def too_few_blocks(blocks: Blocks) -> str:
    """Returns the reason to record when no interval could be given."""
    return (
        f"the held-out text gives {len(blocks.nats)} blocks of {BLOCK_BYTES} bytes or more; an "
        f"interval needs {MIN_BLOCKS}"
    )


def median(values: ArrayLike) -> float:
    """Returns the 50th percentile, interpolated linearly between order statistics."""
    return percentile(values, 50)


def p90(values: ArrayLike) -> float:
    """Returns the 90th percentile, interpolated linearly between order statistics."""
    return percentile(values, 90)


def percentile(values: ArrayLike, q: float) -> float:
    """Returns the q-th percentile by linear interpolation.

    With n sorted values v[0..n-1] it is v at the fractional index (n - 1) * q / 100, so the p90 of
    [1, ..., 11] is 10 and the p90 of [1, 2] is 1.9.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    array = np.asarray(values, np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"a percentile needs finite values, got {array.size} with some not finite"
                         if array.size else "a percentile needs values, got none")  # fmt: skip
    return float(np.percentile(array, q, method="linear"))


class Arrival(NamedTuple):
    """`tokens` new ids became final at `time_s` (seconds on the request's clock)."""

    time_s: float
    tokens: int


class LatencySummary(NamedTuple):
    """What one request's arrivals say.

    Attributes:
        ttft_s: request start to the first arrival.
        gaps_s: times between consecutive arrivals; the time to the first token is not one of them.
        tpot_s: (last - first arrival) / (tokens after the first arrival); None for one arrival.
        tokens: ids that arrived.
        total_s: request start to the last arrival.
        tokens_per_s: tokens / total_s.
        peak_tokens_per_s: highest rate of one arrival, its tokens over the time since the one
            before (since the start for the first); never below `tokens_per_s`.
    """

    ttft_s: float
    gaps_s: tuple[float, ...]
    tpot_s: float | None
    tokens: int
    total_s: float
    tokens_per_s: float
    peak_tokens_per_s: float


def summarize_arrivals(
    arrivals: Sequence[Arrival | tuple[float, int]], *, start_s: float = 0.0
) -> LatencySummary:
    """Summarises the arrivals of one request; tokens are counted by id, never by chunk.

    Args:
        arrivals: (time_s, tokens) in order; a chunk of several ids (a block, an accepted draft) is
            one arrival.
        start_s: when the request was issued, on the same clock.

    Raises:
        ValueError: no arrival, an arrival without tokens, or times that do not increase.
    """
    if not arrivals:
        raise ValueError("a latency summary needs at least one arrival")
    times = [start_s, *(float(time) for time, _ in arrivals)]
    counts = [int(tokens) for _, tokens in arrivals]
    if min(counts) < 1:
        raise ValueError(f"every arrival carries at least one token, got {min(counts)}")
    spans = [after - before for before, after in itertools.pairwise(times)]
    if min(spans) <= 0:
        raise ValueError("arrival times must increase and lie after the start")
    total, later = sum(counts), sum(counts[1:])
    return LatencySummary(
        ttft_s=spans[0],
        gaps_s=tuple(spans[1:]),
        tpot_s=(times[-1] - times[1]) / later if later else None,
        tokens=total,
        total_s=times[-1] - start_s,
        tokens_per_s=total / (times[-1] - start_s),
        peak_tokens_per_s=max(n / span for n, span in zip(counts, spans, strict=True)),
    )
