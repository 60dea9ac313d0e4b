"""Latency of generation: time to the first token, time per step, throughput; and state size.

Three clocks, never mixed. `compile_s` is what the first calls took beyond later ones. `ttft_ms` and
`tokens_per_s` come from a whole request: prompt in, then one compiled loop up to the first output
that can no longer change, then one for the rest. `step_ms_*` come from single steps, each waited
for, as streaming does; they include the host's part.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ..paradigms.decoding.loop import advance, finished
from ..paradigms.decoding.sampling import make_sampling
from ..paradigms.decoding.state import DecodeState, Decoding, raise_failures
from ..paradigms.model import Model
from .results import LatencyRecord
from .statistics import median, p90

LONG = 1 << 24  # tokens; longer than any window, so that a ring counts as fixed


def measure_latency(
    model: Model,
    decoding: Decoding,
    *,
    prompts: NDArray[np.int32],
    new_tokens: int,
    steps: int = 0,
    forbidden_ids: Sequence[int] = (),
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyRecord:
    """Times requests of one shape, at temperature 1 and without stop ids.

    The time to the first token counts from the request to the first output that can no longer
    change, in every row (`decoding.settled`, `decoding.first_output`): the first token for plain
    autoregression, the first block for blocks, all of a canvas that is uncovered in any order.

    Args:
        model: ready to compute (see `Model.prepare`).
        decoding: how to run it.
        prompts: int32 (B T), BOS included, no padding.
        new_tokens: per row.
        steps: model calls for the whole answer; 0 for decodings without such a number.
        forbidden_ids: never drawn.
        repeats: timed requests, after one that warms up.
        clock: seconds.

    Returns:
        The record; `step_ms_*` are None where `start` alone makes the whole answer. `compile_s` is
        close to 0 for a shape that was compiled before, in this process or in a persistent cache.

    Raises:
        CapacityError, ConfigError: the request does not fit; see `Decoding.start`.
        GenlabError: non-finite logits.
        ValueError: fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, want at least 1")
    batch, prompt_length = prompts.shape
    sampling = make_sampling(
        batch,
        vocab_size=model.config.padded_vocab_size,
        steps=steps,
        forbidden_ids=forbidden_ids,
    )
    everything = prompt_length + new_tokens

    def start() -> DecodeState:
        state = decoding.start(
            model,
            prompts,
            sampling=sampling,
            seeds=np.arange(batch, dtype=np.int32),
            max_new=np.full((batch,), new_tokens, np.int32),
            max_len=everything,
        )
        return jax.block_until_ready(state)

    def run(state: DecodeState, n: int) -> DecodeState:
        return jax.block_until_ready(advance(model, decoding, state, n))

    begin = clock()
    # No step is taken, but the program is compiled.
    state = run(start(), 0)
    cold_s = clock() - begin

    # The warm-up steps singly, to see after how many steps the first output is settled.
    output_end = prompt_length + decoding.first_output(new_tokens)
    calls, first = 0, None
    while True:
        settled = int(np.min(np.asarray(decoding.settled(state))))
        if first is None and settled >= output_end:
            first = calls
        if finished(state):
            break
        state = run(state, 1)
        calls += 1
    raise_failures(state)
    first = calls if first is None else first
    made = int(np.sum(np.asarray(state.known))) - batch * prompt_length
    nfe = float(np.mean(np.asarray(state.nfe)))

    begin = clock()
    run(start(), 0)
    compile_s = max(0.0, cold_s - (clock() - begin))

    ttft_s, total_s, step_s = [], [], []
    for _ in range(repeats):
        begin = clock()
        state = start()
        if first:
            state = run(state, first)
        ttft_s.append(clock() - begin)
        if calls > first:
            run(state, calls - first)
        total_s.append(clock() - begin)
        state = start()
        for _ in range(calls):
            before = clock()
            state = run(state, 1)
            step_s.append(clock() - before)
    return LatencyRecord(
        batch=batch,
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        ttft_ms=1e3 * median(ttft_s),
        step_ms_p50=1e3 * median(step_s) if step_s else None,
        step_ms_p90=1e3 * p90(step_s) if step_s else None,
        tokens_per_s=made / median(total_s),
        tokens_per_call=made / batch / nfe,
        compile_s=compile_s,
    )


def state_bytes(model: Model) -> tuple[int, float, list[tuple[int, float]]]:
    """Bytes of one row's model state, from its arrays' shapes and dtypes.

    Returns:
        Bytes that do not grow with the context (recurrent states, full windows), bytes per token,
        and of each length of window among the former, its tokens and its bytes per token.
    """

    def leaves(max_len: int) -> list[Any]:
        shapes: Any = jax.eval_shape(lambda m: m.init_state(1, max_len), model)
        return jax.tree.leaves(shapes)

    def size(leaf: Any) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize

    least, long, longer = leaves(1), leaves(LONG), leaves(LONG + 1)
    per_token = sum(map(size, longer)) - sum(map(size, long))
    windows: Counter[int] = Counter()
    for small, full, more in zip(least, long, longer, strict=True):
        if small.shape != full.shape == more.shape:
            windows[size(full) // size(small)] += size(small)
    fixed = sum(map(size, long)) - LONG * per_token
    return fixed, float(per_token), [(n, float(b)) for n, b in sorted(windows.items())]
