"""Scores a held-out split window by window: used during training and by the harness alike."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from ..paradigms.interface import Batch, Likelihood
from ..paradigms.model import Model
from .data.windows import EvaluationWindows


class WindowScores(NamedTuple):
    """What a model makes of every window, in text order.

    Attributes:
        nats: float64 [windows], negative log-likelihood or its bound.
        variance: float64 [windows], Monte-Carlo variance of `nats`.
        num_bytes: int64 [windows], bytes of text.
        tokens: scored tokens, all windows.
        draws: Monte-Carlo draws per window, 0 where exact.
        is_bound: the nats bound the truth from above.
    """

    nats: np.ndarray
    variance: np.ndarray
    num_bytes: np.ndarray
    tokens: int
    draws: int
    is_bound: bool

    @property
    def bits_per_byte(self) -> float:
        """Total nats over ln 2 times total bytes: never a mean of means."""
        return float(self.nats.sum() / (math.log(2) * self.num_bytes.sum()))

    @property
    def standard_error_bits_per_byte(self) -> float:
        """Monte-Carlo standard error of `bits_per_byte`; 0.0 where exact."""
        return float(math.sqrt(self.variance.sum()) / (math.log(2) * self.num_bytes.sum()))


@partial(jax.jit, static_argnames=("paradigm", "dtype"))
def _score(
    model: Model, batch: Batch, key: Key[Array, ""], *, paradigm: Any, dtype: str
) -> Likelihood:
    return paradigm.log_likelihood(model.prepare(dtype), batch, key=key)


def score_windows(
    model: Model,
    paradigm: Any,
    windows: EvaluationWindows,
    *,
    batch_size: int,
    seed: int = 0,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> WindowScores:
    """Scores every window once, without carrying state between windows.

    Args:
        model: float32 parameters.
        paradigm: frozen, with `log_likelihood`.
        windows: BOS and text per row; padding is not scored.
        batch_size: rows per call; one program is compiled.
        seed: of the Monte-Carlo draws.
        dtype: compute dtype.
        progress: called as progress(done, total) windows.

    Raises:
        FloatingPointError: a window's value is not finite; names the window.
    """
    nats, variance = np.zeros(len(windows)), np.zeros(len(windows))
    tokens, draws, is_bound = 0, 0, False
    key = jax.random.key(seed)
    for number, (indices, batch) in enumerate(windows.batches(batch_size)):
        result = _score(
            model, batch, jax.random.fold_in(key, number), paradigm=paradigm, dtype=dtype
        )
        real = indices >= 0
        nats[indices[real]] = np.asarray(result.nll_nats, np.float64)[real]
        variance[indices[real]] = np.asarray(result.variance, np.float64)[real]
        tokens += int(np.asarray(result.tokens)[real].sum())
        draws, is_bound = int(result.draws), bool(result.is_bound)
        if progress is not None:
            progress(int(indices.max()) + 1, len(windows))
    bad = np.flatnonzero(~np.isfinite(nats))
    if bad.size:
        raise FloatingPointError(f"window {bad[0]} of {len(windows)}: nll is {nats[bad[0]]}")
    return WindowScores(nats, variance, windows.byte_counts, tokens, draws, is_bound)
