"""Intervals and latency summaries: exact figures, coverage, invariants."""

import math

import numpy as np
import pytest
from genlab.eval import statistics
from genlab.eval.statistics import Arrival, Blocks


def test_bits_per_byte():
    assert statistics.bits_per_byte(math.log(256) * 13, 13) == pytest.approx(8, rel=1e-12)
    with pytest.raises(ValueError, match="scored bytes"):
        statistics.bits_per_byte(1.0, 0)


def test_blocks_hold_every_byte_once_and_are_large_enough():
    rng = np.random.default_rng(0)
    sizes, nats = rng.integers(1, 900, 500), rng.random(500)
    blocks = statistics.group_blocks(nats, sizes)
    assert blocks.num_bytes.sum() == sizes.sum()
    assert blocks.nats.sum() == pytest.approx(nats.sum(), rel=1e-12)
    assert blocks.num_bytes.min() >= 2048
    edges = set(np.cumsum(sizes).tolist())
    assert set(np.cumsum(blocks.num_bytes).tolist()) <= edges  # consecutive windows only


def test_short_rest_joins_the_last_block():
    blocks = statistics.group_blocks([1.0, 2.0, 4.0], [2048, 2048, 10])
    assert blocks.num_bytes.tolist() == [2048, 2058]
    assert blocks.nats.tolist() == [1.0, 6.0]
    assert statistics.group_blocks([1.0, 2.0], [3, 4]).num_bytes.tolist() == [7]


@pytest.mark.parametrize(("nats", "sizes"), [([], []), ([1.0], [1, 2]), ([[1.0]], [[1]])])
def test_malformed_windows_are_refused(nats, sizes):
    with pytest.raises(ValueError, match="equal non-empty vectors"):
        statistics.group_blocks(nats, sizes)


def test_interval_covers_the_truth_95_times_in_100():
    """Ratio of sums over 60 blocks, 400 data sets: coverage within binomial noise of 0.95."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(400):
        sizes = rng.integers(2048, 2600, 60)
        nats = sizes * math.log(2) * rng.normal(2.5, 0.3, 60)
        low, high = statistics.bootstrap_bits_per_byte(
            Blocks(nats, sizes), seed=trial, resamples=2000
        )
        hits += low <= 2.5 <= high
    assert 0.91 <= hits / 400 <= 0.98


def test_interval_is_seeded_and_shrinks_with_the_text():
    rng = np.random.default_rng(2)
    nats, sizes = rng.normal(3000, 300, 1600), np.full(1600, 2048)

    def width(n, seed=0):
        low, high = statistics.bootstrap_bits_per_byte(Blocks(nats[:n], sizes[:n]), seed=seed)
        return high - low

    assert width(100) == width(100)
    assert width(100) != width(100, seed=1)
    assert width(1600) / width(100) == pytest.approx(1 / 4, rel=0.25)


def test_too_few_blocks_give_no_interval_but_a_reason():
    blocks = Blocks(np.ones(7), np.full(7, 2048))
    assert statistics.bootstrap_bits_per_byte(blocks) is None
    assert "7 blocks" in statistics.too_few_blocks(blocks)
    with pytest.raises(ValueError, match="2000 or more resamples"):
        statistics.bootstrap_bits_per_byte(Blocks(np.ones(9), np.full(9, 2048)), resamples=100)


def test_paired_difference_is_sharper_than_the_two_intervals():
    """A constant gap of 0.01 hides in the spread of the text, but not in the difference."""
    rng = np.random.default_rng(3)
    sizes = np.full(200, 2048)
    nats = sizes * math.log(2) * rng.normal(2.5, 0.2, 200)
    other = nats + sizes * math.log(2) * rng.normal(0.01, 0.01, 200)
    a = statistics.bootstrap_bits_per_byte(Blocks(nats, sizes))
    b = statistics.bootstrap_bits_per_byte(Blocks(other, sizes))
    assert a.high > b.low  # the intervals overlap
    difference = statistics.paired_difference(other, nats, sizes)
    assert 0 < difference.low < 0.01 < difference.high
    assert statistics.paired_difference(nats, nats, sizes) == (0, 0)
    with pytest.raises(ValueError, match="blocks differ"):
        statistics.paired_difference(nats, nats, sizes[:-1])
    assert statistics.paired_difference(nats[:5], nats[:5], sizes[:5]) is None


def test_percentiles_interpolate_linearly():
    assert statistics.p90(range(1, 12)) == 10
    assert statistics.p90([1, 2]) == pytest.approx(1.9)
    assert statistics.median([4, 1, 2, 3]) == 2.5
    assert statistics.percentile([5], 99) == 5
    with pytest.raises(ValueError, match="got none"):
        statistics.median([])
    with pytest.raises(ValueError, match="not finite"):
        statistics.median([1.0, math.nan])


def test_arrivals_with_a_chunk():
    """Arrivals 0.5 (1 token), 0.8 (3), 1.1 (1): the first wait is no gap, tokens count by id."""
    summary = statistics.summarize_arrivals([(0.5, 1), (0.8, 3), (1.1, 1)])
    assert summary.ttft_s == 0.5
    assert summary.gaps_s == pytest.approx((0.3, 0.3))
    assert 0.5 not in summary.gaps_s
    assert summary.tpot_s == pytest.approx(0.15)
    assert summary.tokens == 5
    assert summary.tokens_per_s == pytest.approx(5 / 1.1)
    assert round(summary.tokens_per_s, 2) == 4.55
    assert summary.peak_tokens_per_s == pytest.approx(10)


def test_peak_is_never_below_the_average():
    rng = np.random.default_rng(4)
    for _ in range(200):
        n = int(rng.integers(1, 12))
        times = np.cumsum(rng.exponential(size=n) + 1e-3) + 5
        arrivals = [Arrival(float(t), int(rng.integers(1, 9))) for t in times]
        summary = statistics.summarize_arrivals(arrivals, start_s=5)
        assert summary.peak_tokens_per_s >= summary.tokens_per_s * (1 - 1e-12)
        assert len(summary.gaps_s) == n - 1


def test_a_whole_canvas_arrives_at_once():
    summary = statistics.summarize_arrivals([(2.0, 64)])
    assert summary.ttft_s == summary.total_s == 2
    assert summary.gaps_s == ()
    assert summary.tpot_s is None
    assert summary.tokens_per_s == 32


def test_tokens_of_a_first_chunk_are_not_spread_over_later_time():
    summary = statistics.summarize_arrivals([(1.0, 8), (2.0, 8)])
    assert summary.tpot_s == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ([], "at least one arrival"),
        ([(1.0, 0)], "at least one token"),
        ([(1.0, 1), (1.0, 1)], "must increase"),
        ([(0.0, 1)], "must increase"),
    ],
)
def test_bad_arrivals_are_refused(arrivals, message):
    with pytest.raises(ValueError, match=message):
        statistics.summarize_arrivals(arrivals)
