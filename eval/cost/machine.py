"""Microbenchmarks of this machine: bandwidth, matrix products, kernels, and starting operations.

Each takes the best of its repeats: what the machine can do. Whatever else runs on it only slows a
repeat down, so that a median would say how busy the machine was.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...paradigms.layers.linear import linear
from .kernel_probes import PROBES, Probe
from .launches import count_launches
from .records import BandwidthPoint, KernelRate, Machine, MatmulPoint

WORKING_SETS = tuple(1 << power for power in (18, 20, 22, 24, 25, 26, 27, 28))  # bytes
WIDTHS, ROWS = (64, 128, 512, 1024), (8, 64, 256, 1024)
REPEATS = 9
TURNS_S = 0.02  # a measured loop runs about so long


def measure_machine(
    dtype: str,
    *,
    largest_bytes: int = WORKING_SETS[-1],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Machine:
    """Measures the default device; about half a minute on a laptop, most of it compilation.

    Args:
        dtype: of weights and inputs.
        largest_bytes: working sets beyond are left out.
        progress: called with finished and all measurements.
    """
    sizes = [size for size in WORKING_SETS if size <= largest_bytes] or [WORKING_SETS[0]]
    total = len(sizes) + len(WIDTHS) * len(ROWS) + len(PROBES) + 1
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    bandwidth = []
    for size in sizes:
        bandwidth.append(_bandwidth(size, dtype))
        step()
    matmul = []
    for width in WIDTHS:
        for rows in ROWS:
            matmul.append(_matmul(rows, width, dtype))
            step()
    kernels = {}
    for name, make in PROBES.items():
        probes = make(jnp.dtype(dtype))
        many, one = probes.many, probes.one
        kernels[name] = KernelRate(
            flops_per_s=many.amount / _call_s(many),
            loop_flops_per_s=many.amount / _turn_s(many),
            state_bytes_per_s=None if one is None else one.amount / _turn_s(one),
        )
        step()
    loop_launch, launch, call = _launches()
    step()
    device = jax.devices()[0]
    return Machine(
        device=f"{device.platform}: {device.device_kind}",
        jax=jax.__version__,
        dtype=dtype,
        peak_flops_per_s=max(max(p.flops_per_s, p.loop_flops_per_s) for p in matmul),
        bandwidth=bandwidth,
        matmul=matmul,
        kernels=kernels,
        loop_launch_s=loop_launch,
        launch_s=launch,
        call_s=call,
    )


def _bandwidth(size: int, dtype: str) -> BandwidthPoint:
    """One row times square matrices that fill the working set, as a decode step reads weights."""
    itemsize = jnp.dtype(dtype).itemsize
    width = 128 if size < 1 << 22 else 512
    count = max(1, size // (width * width * itemsize))
    matrices = [_matrix(i, width, width, dtype) for i in range(count)]

    def run(x: Array, held: Any) -> Array:
        for matrix in held:
            x = linear(x, matrix)  # as models do: a lone row may need company
        return x

    probe = Probe(run, jnp.ones((1, width), dtype), matrices, 0.0, fixed=True)
    moved = count * width * width * itemsize
    return BandwidthPoint(working_set_bytes=moved, bytes_per_s=moved / _turn_s(probe))


def _matmul(rows: int, width: int, dtype: str) -> MatmulPoint:
    """A chain of four products with different matrices, so that none is hoisted out."""
    matrices = [_matrix(i, width, width, dtype) for i in range(4)]

    def run(x: Array, held: Any) -> Array:
        for matrix in held:
            x = x @ matrix
        return x

    probe = Probe(run, jnp.ones((rows, width), dtype), matrices, 0.0, fixed=True)
    flops = 4 * 2 * rows * width * width
    return MatmulPoint(
        rows=rows,
        width=width,
        flops_per_s=flops / _call_s(probe),
        loop_flops_per_s=flops / _turn_s(probe),
    )


def _launches() -> tuple[float, float, float]:
    """Seconds per small operation in a loop and in a plain call, and of an empty call."""

    def probe(length: int) -> Probe:
        def run(x: Array, held: Any) -> Array:
            for _ in range(length):
                x = x * held - jnp.max(x)  # a reduction ends a fusion
            return x

        return Probe(run, jnp.ones((1, 128), jnp.float32), jnp.float32(0.5), 0.0, fixed=True)

    def launched(length: int) -> float:
        short = probe(length)
        text = jax.jit(short.run).lower(short.x, short.held).compile().as_text()
        return count_launches(text).once

    few, many = 4, 68
    more = launched(many) - launched(few)
    loop = (_turn_s(probe(many)) - _turn_s(probe(few))) / more
    short = _call_s(probe(few))
    plain = (_call_s(probe(many)) - short) / more
    return max(0.0, loop), max(0.0, plain), max(0.0, short - launched(few) * max(0.0, plain))


def _call_s(probe: Probe) -> float:
    """Seconds of one compiled call."""
    compiled = jax.jit(probe.run)
    jax.block_until_ready(compiled(probe.x, probe.held))
    calls = max(1, round(TURNS_S / 4 / max(1e-6, _once(lambda: compiled(probe.x, probe.held)))))

    def several() -> Any:
        for _ in range(calls):
            y = compiled(probe.x, probe.held)
            jax.block_until_ready(y)
        return y

    return min(_once(several) / calls for _ in range(REPEATS))


def _turn_s(probe: Probe) -> float:
    """Seconds of one turn of a compiled loop around the operation."""

    @jax.jit
    def loop(x: Array, held: Any, turns: Array) -> Array:
        def body(_: Array, carried: Array) -> Array:
            own = held
            if not probe.fixed:
                # Or the compiler would compute once, before the loop, what depends on it alone.
                carried, own = jax.lax.optimization_barrier((carried, held))
            return jnp.clip(probe.run(carried, own), -1, 1)  # turns must not grow without end

        return jax.lax.fori_loop(0, turns, body, x)

    def run(turns: int) -> float:
        return _once(lambda: loop(probe.x, probe.held, np.int32(turns)))

    run(1)
    turns = max(2, min(100_000, round(TURNS_S / max(1e-6, run(2) / 2))))
    return min(run(turns) / turns for _ in range(REPEATS))


def _once(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def _matrix(seed: int, rows: int, columns: int, dtype: str) -> Array:
    drawn = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return jnp.asarray(drawn / rows**0.5, dtype)
