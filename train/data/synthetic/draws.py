"""Random numbers by address: raw Philox bits, whose values no NumPy release changes."""

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]


def random_bits(
    seed: int, stream: int, indices: NDArray[np.int64], attempt: int, count: int
) -> Bits:
    """Returns uint64 [n count], a function of (seed, stream, index, attempt) for each row.

    Seed and stream are the generator's key, index and attempt are in its counter: numbers of
    different addresses are never the same part of a sequence.
    """
    key = np.array([seed, stream], np.uint64)
    rows = np.empty((len(indices), count), np.uint64)
    for row, index in enumerate(indices):
        counter = np.array([0, attempt, index, 0], np.uint64)
        rows[row] = np.random.Philox(key=key, counter=counter).random_raw(count)
    return rows


def below(bits: Bits, n: int) -> NDArray[np.int64]:
    """Uniform integers from 0 to n - 1, each probability right to within 2^-32."""
    return ((bits >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)


def chance(bits: Bits, probability: float) -> NDArray[np.bool_]:
    """True with the given probability."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 < probability


def permutations(bits: Bits) -> NDArray[np.int64]:
    """A permutation of 0 to k - 1 in each row of [n k]."""
    return np.argsort(bits, axis=1, kind="stable")


def mix(values: Bits) -> Bits:
    """The finaliser of SplitMix64: a bijection that spreads every bit over all others."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
