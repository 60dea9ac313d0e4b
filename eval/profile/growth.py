"""How the time and the memory of a generation grow with its length; how parallel a call is."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ...paradigms.context import Context
from ...paradigms.decoding.loop import advance
from ...paradigms.decoding.sampling import make_sampling
from ...paradigms.decoding.state import DecodeState, Decoding, raise_failures
from ...paradigms.masks import Full
from ...paradigms.model import Model
from ..statistics import median
from .records import Growth, GrowthPoint, Parallelism


def fitted_exponent(lengths: Sequence[float], times: Sequence[float]) -> float:
    """Slope of the least-squares line through (log length, log time): time ~ length^slope.

    Raises:
        ValueError: fewer than two lengths, or a value that is not positive.
    """
    if len(lengths) < 2 or len(lengths) != len(times):
        raise ValueError(f"want at least two lengths and as many times, got {len(lengths)}")
    if min(*lengths, *times) <= 0:
        raise ValueError("lengths and times must be positive")
    x, y = np.log(np.asarray(lengths, float)), np.log(np.asarray(times, float))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def array_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree (shapes will do)."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def measure_growth(
    model: Model,
    decoding: Decoding,
    prompt: NDArray[np.int32],
    lengths: Sequence[int],
    *,
    forbidden_ids: Sequence[int],
    repeats: int,
    budget_s: float,
    progress: Callable[[int, int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Growth:
    """Times requests of growing length at batch 1 and temperature 1.

    A decoding with a step count makes one call per new token, as its quality is best there.

    Args:
        model: ready to compute; its length is changed as needed.
        decoding: how to run it.
        prompt: int32 (T), BOS included.
        lengths: new tokens, increasing; at least two.
        forbidden_ids: never drawn; there are no stop ids.
        repeats: timed requests per length after one that compiles.
        budget_s: a length whose request would take longer than this, by the law seen so far, is
            left out, with all longer ones; the first two lengths are always measured.
        progress: called as progress(done, total).
        clock: seconds.
    """
    points: list[GrowthPoint] = []
    stopped = None
    for done, new_tokens in enumerate(lengths):
        progress(done, len(lengths))
        if len(points) >= 2:
            last, before = points[-1], points[-2]
            slope = fitted_exponent(
                [before.new_tokens, last.new_tokens], [before.time_ms, last.time_ms]
            )
            expected = last.time_ms * (new_tokens / last.new_tokens) ** max(slope, 1.0)
            if expected > 1e3 * budget_s:
                stopped = (
                    f"{new_tokens} tokens would take about {expected / 1e3:.0f} s, more than "
                    f"{budget_s:g} s"
                )
                break
        points.append(
            _point(model, decoding, prompt, new_tokens, forbidden_ids, repeats, clock)
        )
    progress(len(lengths), len(lengths))
    sizes, times = [p.new_tokens for p in points], [p.time_ms for p in points]
    return Growth(
        prompt_length=len(prompt),
        points=points,
        exponent=fitted_exponent(sizes, times),
        exponent_tail=fitted_exponent(sizes[-2:], times[-2:]),
        calls_per_token=points[-1].nfe / points[-1].new_tokens,
        stopped=stopped,
    )


def _point(
    model: Model,
    decoding: Decoding,
    prompt: NDArray[np.int32],
    new_tokens: int,
    forbidden_ids: Sequence[int],
    repeats: int,
    clock: Callable[[], float],
) -> GrowthPoint:
    everything = len(prompt) + new_tokens
    longer = model.with_max_len(max(everything, model.config.max_len))
    sampling = make_sampling(
        1,
        vocab_size=model.config.padded_vocab_size,
        steps=new_tokens if decoding.uses_steps else 0,
        forbidden_ids=forbidden_ids,
    )

    def request() -> DecodeState:
        state = decoding.start(
            longer,
            prompt[None],
            sampling=sampling,
            seeds=np.zeros((1,), np.int32),
            max_new=np.full((1,), new_tokens, np.int32),
            max_len=everything,
        )
        return jax.block_until_ready(advance(longer, decoding, state, everything))

    state = request()  # compiles
    raise_failures(state)
    times = []
    for _ in range(repeats):
        begin = clock()
        request()
        times.append(1e3 * (clock() - begin))
    held = state.model_state if decoding.keeps_state else ()
    return GrowthPoint(
        new_tokens=new_tokens,
        time_ms=median(times),
        nfe=float(np.asarray(state.nfe)[0]),
        state_bytes=array_bytes(held),
    )


def measure_parallelism(
    model: Model,
    length: int,
    *,
    causal: bool,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> Parallelism:
    """Times a forward pass without state on `length` tokens at once, and on one token.

    Args:
        model: ready to compute.
        length: T.
        causal: False for models whose tokens look both ways.
        repeats: timed calls after one that compiles.
        clock: seconds.
    """
    ctx = Context() if causal else Context(mask=Full())

    @jax.jit
    def forward(model: Model, tokens: jax.Array) -> jax.Array:
        return model.head(model(tokens, ctx=ctx)[0].hidden)

    def timed(size: int) -> float:
        tokens = jnp.zeros((1, size), jnp.int32)
        jax.block_until_ready(forward(model, tokens))
        times = []
        for _ in range(repeats):
            begin = clock()
            jax.block_until_ready(forward(model, tokens))
            times.append(1e3 * (clock() - begin))
        return median(times)

    together, one = timed(length), timed(1)
    return Parallelism(
        length=length, together_ms=together, one_ms=one, factor=length * one / together
    )
