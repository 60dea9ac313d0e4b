"""When two runs that should choose the same tokens did so.

Matrix products of other shapes round differently (about 1e-6), so that a near tie may fall the
other way. The rule: ids are equal, except where the two best logits of the reference lie closer
than `TIE`; what follows in that row comes from another text and is not compared. Ties are counted,
and at most one in `PER_TIE` compared tokens may be one.
"""

from typing import NamedTuple

import numpy as np

TIE = 1e-4
PER_TIE = 500


class Comparison(NamedTuple):
    """What was found.

    Attributes:
        compared: tokens looked at, ties included.
        excused: rows that parted at a near tie.
        wrong: (row, position) of the first difference of every other row that parted.
    """

    compared: int
    excused: int
    wrong: list[tuple[int, int]]


def top2_gap(logits: np.ndarray) -> np.ndarray:
    """Best less second-best logit: (... V) -> (...)."""
    two = np.partition(np.asarray(logits, np.float32), -2, axis=-1)[..., -2:]
    return two[..., 1] - two[..., 0]


def compare_ids(got, want, gap, valid=None) -> Comparison:
    """Compares row by row up to the first difference.

    Args:
        got: int (B T), ids.
        want: int (B T), the reference's ids.
        gap: float (B T), the reference's `top2_gap` where it chose each id.
        valid: bool (B T), the positions to compare; all when None.
    """
    got, want, gap = np.asarray(got), np.asarray(want), np.asarray(gap)
    if not got.shape == want.shape == gap.shape:
        raise ValueError(f"shapes differ: got {got.shape}, want {want.shape}, gap {gap.shape}")
    valid = np.ones(got.shape, bool) if valid is None else np.asarray(valid)
    compared, excused, wrong = 0, 0, []
    for row in range(got.shape[0]):
        for position in np.flatnonzero(valid[row]):
            compared += 1
            if got[row, position] == want[row, position]:
                continue
            if gap[row, position] < TIE:
                excused += 1
            else:
                wrong.append((row, int(position)))
            break
    return Comparison(compared, excused, wrong)


def assert_same_ids(got, want, gap, valid=None) -> Comparison:
    """Asserts that ids are equal but for rare near ties; returns what was found."""
    found = compare_ids(got, want, gap, valid)
    assert found.compared > 0, "nothing was compared"
    assert not found.wrong, f"ids differ (row, position): {found.wrong}"
    assert found.excused * PER_TIE <= found.compared, f"too many near ties: {found}"
    return found
