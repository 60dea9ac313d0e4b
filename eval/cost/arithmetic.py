"""Closed formulas: crossover of weights and state, roofline, prices."""

import itertools
import math

from .records import Machine


def crossover_context(
    weight_bytes: float, state_bytes_per_token: float, batch: int = 1, state_bytes_fixed: float = 0
) -> float | None:
    """Context length at which a decode step reads as many bytes of state as of weights.

    weights = fixed + batch * per_token * context; the weights are read once for all rows.

    Args:
        weight_bytes: read per step.
        state_bytes_per_token: of one row, per token of context.
        batch: rows.
        state_bytes_fixed: of one row, read whatever the context.

    Returns:
        Tokens (0 where the fixed state alone is larger); None when the state does not grow.
    """
    if state_bytes_per_token <= 0:
        return None
    left = weight_bytes - batch * state_bytes_fixed
    return max(0.0, left / (batch * state_bytes_per_token))


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_value: float) -> float:
    """Bytes of keys and values that one token leaves in all layers together."""
    return 2.0 * layers * kv_heads * head_dim * bytes_per_value


def bandwidth_at(machine: Machine, working_set_bytes: float) -> float:
    """Bytes per second at a working set: between measured points by its logarithm."""
    points = [(float(p.working_set_bytes), p.bytes_per_s) for p in machine.bandwidth]
    return between(points, working_set_bytes)


def matmul_rate(machine: Machine, rows: float, width: float, *, loop: bool) -> float:
    """FLOPs per second of matrix products of such a shape: between measured ones."""
    by_width = []
    for measured in sorted({point.width for point in machine.matmul}):
        points = [
            (float(p.rows), p.loop_flops_per_s if loop else p.flops_per_s)
            for p in machine.matmul
            if p.width == measured
        ]
        by_width.append((float(measured), between(points, rows)))
    return between(by_width, width)


def roofline_s(flops: float, bytes_moved: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Seconds that no program can beat: compute or memory, whichever takes longer."""
    return max(flops / flops_per_s, bytes_moved / bytes_per_s)


def between(points: list[tuple[float, float]], at: float) -> float:
    """Value at `at` on the line through measured points, both axes logarithmic; flat outside."""
    points = sorted(points)
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if at <= x1:
            share = math.log(at / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0))
    return points[-1][1]


def usd_per_million(seconds_per_token: float, usd_per_hour: float) -> float:
    """Price of a million tokens at so many seconds of the device each."""
    return 1e6 * seconds_per_token * usd_per_hour / 3600.0
