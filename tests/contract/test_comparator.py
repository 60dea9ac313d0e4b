"""The rule for equal ids excuses near ties, counts them, and nothing else."""

import numpy as np
import pytest


def test_gap(comparator):
    logits = np.array([[1.0, 3.0, 2.5], [-1e30, 0.0, 0.0]])
    np.testing.assert_allclose(comparator.top2_gap(logits), [0.5, 0.0])


def test_equal_ids_pass(comparator):
    ids, gap = np.arange(6).reshape(2, 3), np.ones((2, 3))
    assert comparator.assert_same_ids(ids, ids, gap) == (6, 0, [])


def test_a_difference_without_a_tie_is_wrong(comparator):
    want, gap = np.zeros((2, 4), int), np.ones((2, 4))
    got = want.copy()
    got[1, 2:] = 5
    assert comparator.compare_ids(got, want, gap) == (7, 0, [(1, 2)])
    with pytest.raises(AssertionError, match=r"\(1, 2\)"):
        comparator.assert_same_ids(got, want, gap)
    valid = np.ones((2, 4), bool)
    valid[1, 2:] = False
    assert comparator.assert_same_ids(got, want, gap, valid).compared == 6


def test_a_near_tie_is_excused_once_in_five_hundred(comparator):
    want, gap = np.zeros((2, 400), int), np.ones((2, 400))
    got = want.copy()
    got[1, 200:] = 5
    gap[1, 200] = 5e-5
    assert comparator.assert_same_ids(got, want, gap) == (601, 1, [])
    with pytest.raises(AssertionError, match="too many near ties"):
        comparator.assert_same_ids(got[1:], want[1:], gap[1:])
    gap[1, 200] = 2e-4
    assert comparator.compare_ids(got, want, gap).wrong == [(1, 200)]


def test_nothing_compared_is_no_success(comparator):
    with pytest.raises(AssertionError, match="nothing"):
        comparator.assert_same_ids(np.zeros((1, 0)), np.zeros((1, 0)), np.zeros((1, 0)))
    with pytest.raises(ValueError, match="shapes differ"):
        comparator.compare_ids(np.zeros((1, 2)), np.zeros((1, 3)), np.zeros((1, 2)))
