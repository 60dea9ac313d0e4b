"""Rows whose keys and values lie scattered in a pool, beside the same rows lying in one piece."""

from typing import NamedTuple

import numpy as np


class Scene(NamedTuple):
    """Arrays of one call.

    Attributes:
        q: (B T N H).
        k_pool, v_pool: (pool block K H), NaN wherever nothing was written.
        table: int32 (B blocks), shuffled; entries behind a row's length are garbage.
        lengths: int32 (B).
        k, v: (B S K H), the rows in one piece; zeros behind their lengths.
    """

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def arguments(self):
        """What the op takes."""
        return self[:5]


def edges(block):
    """Lengths around the ends of blocks, and an empty row."""
    b = block
    return (0, 1, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 3 * b + 7)


def make_scene(lengths, *, queries=1, heads=4, kv_heads=2, head_dim=6, block=4, shared=0,
               dtype=np.float32):  # fmt: skip
    """Returns a scene; every row's first `shared` blocks are those of the first row that long."""
    draw = np.random.default_rng(len(lengths) + queries)

    def normal(*shape):
        return draw.standard_normal(shape, np.float32)

    batch, blocks = len(lengths), -(-max(lengths) // block) + 1
    k, v = (normal(batch, blocks * block, kv_heads, head_dim) for _ in "kv")
    owner = next((r for r, n in enumerate(lengths) if n >= shared * block), None)
    for x in (k, v):
        x[:, : shared * block] = x[owner, : shared * block]
        x[np.arange(blocks * block) >= np.array(lengths)[:, None]] = 0
    pool = 2 + sum(-(-n // block) for n in lengths)
    free = iter(draw.permutation(pool))
    k_pool, v_pool = (np.full((pool, block, kv_heads, head_dim), np.nan, np.float32) for _ in "kv")
    table = draw.choice([-1, -7, pool, pool + 5, 2**31 - 1, 0, 1], (batch, blocks))
    for row in (owner, *(r for r in range(batch) if r != owner)):
        for n in range(-(-lengths[row] // block)):
            if n < shared and row != owner and lengths[row] >= (n + 1) * block:
                table[row, n] = table[owner, n]
                continue
            table[row, n] = next(free)
            there = slice(n * block, min((n + 1) * block, lengths[row]))
            for of, to in ((k, k_pool), (v, v_pool)):
                to[table[row, n], : there.stop - there.start] = of[row, there]
    q = normal(batch, queries, heads, head_dim)
    q, k_pool, v_pool, k, v = (x.astype(dtype) for x in (q, k_pool, v_pool, k, v))
    numbers = (table.astype(np.int32), np.array(lengths, np.int32))
    return Scene(q, k_pool, v_pool, *numbers, k, v)


def by_loops(scene, *, offsets=None, window=None, scale=None, soft_cap=None):
    """The equation in float64, key by key: the output and the log of the denominator."""
    q = scene.q.astype(np.float64)
    batch, queries, heads, head_dim = q.shape
    block, kv_heads = scene.k_pool.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out, log_total = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(batch):
        length = scene.lengths[b]
        first = length - queries if offsets is None else offsets[b]
        for t in range(queries):
            position = first + t
            if not 0 <= position < length:
                continue
            lowest = 0 if window is None else max(position - window + 1, 0)
            for n in range(heads):
                scores, values = [], []
                for s in range(lowest, position + 1):
                    at = scene.table[b, s // block], s % block, n * kv_heads // heads
                    score = q[b, t, n] @ scene.k_pool[at].astype(np.float64) * scale
                    scores.append(soft_cap * np.tanh(score / soft_cap) if soft_cap else score)
                    values.append(scene.v_pool[at].astype(np.float64))
                total = np.exp(scores).sum()
                out[b, t, n] = np.exp(scores) @ np.array(values) / total
                log_total[b, t, n] = np.log(total)
    return out, log_total


def assert_equal(got, want, tolerance=1e-5):
    """Equal outputs and denominators, within rounding of the largest element of each."""
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other))
        one, other = (np.where(np.isneginf(x), 0, x) for x in (one, other))
        assert np.isfinite(one).all()
        limit = tolerance * (1 + np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)
