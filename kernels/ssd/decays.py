"""Decays between the steps of a chunk, from sums of logarithms that keep their digits."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# exp(-104) is below the smallest float32, so any smaller exponent is as good.
LOWEST_LOG = -104.0


class Decays(NamedTuple):
    """Rows over the steps of each chunk; `exact` and `rest` are sums from the chunk's first step.

    The sum of the logs s + 1 .. t is (exact_t - exact_s) + (rest_t - rest_s).
    """

    exact: Float[Array, "... C"]  # multiples of a power of two: sums and differences are exact
    rest: Float[Array, "... C"]
    document: Float[Array, "... C"]  # resets so far: steps see each other where it is equal
    from_start: Float[Array, "... C"]  # factor from the state before the chunk to step t
    to_end: Float[Array, "... C"]  # factor from step s to the chunk's last step


def exact_part(logs: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Rounds logs of at least `LOWEST_LOG` so coarsely that sums over a chunk are exact in float32.

    A difference of plain cumulative sums loses digits when the sums are large: at dt A = -50 a
    chunk of 64 sums to -3200, where float32 is coarser than 1e-4.
    """
    grid = 2.0 ** (math.ceil(math.log2(-LOWEST_LOG * logs.shape[-1])) - 23)
    return jnp.round(logs / grid) * grid


def decays(logs: Float[Array, "B N Z C"], reset: Bool[Array, "B Z C"] | None) -> Decays:
    """Returns the decays of every chunk (Z of them); 0 across a reset.

    Args:
        logs: dt A per step, at least `LOWEST_LOG`.
        reset: True where a document begins.
    """
    coarse = exact_part(logs)
    exact, rest = jnp.cumsum(coarse, axis=-1), jnp.cumsum(logs - coarse, axis=-1)
    log_end = (exact[..., -1:] - exact) + (rest[..., -1:] - rest)
    from_start, to_end = jnp.exp(exact + rest), jnp.exp(log_end)
    document = jnp.zeros_like(logs)
    if reset is not None:
        starts = jnp.cumsum(reset.astype(jnp.float32), axis=-1)[:, None]
        document = document + starts
        from_start = jnp.where(starts == 0, from_start, 0.0)
        to_end = jnp.where(starts == starts[..., -1:], to_end, 0.0)
    return Decays(exact, rest, document, from_start, to_end)


def log_cotangent(
    pairs: Float[Array, "... C"], start: Float[Array, "... C"], end: Float[Array, "... C"]
) -> Float[Array, "... C"]:
    """Returns the cotangent of the logs of a chunk.

    Log r is in the decay from step s to t for s < r <= t, from the start to t for t >= r, and from
    s to the end for s < r. No sums are subtracted, which would cancel only up to rounding.

    Args:
        pairs: the sum over all s < r <= t of the cotangents of the logs of their decays, by r.
        start: the cotangent of the log of `from_start`, by t.
        end: likewise of `to_end`, by s.
    """
    later = jnp.flip(jnp.cumsum(jnp.flip(start, -1), axis=-1), -1)
    earlier = jnp.cumsum(end, axis=-1)
    earlier = jnp.pad(earlier[..., :-1], ((0, 0),) * (end.ndim - 1) + ((1, 0),))
    return pairs + later + earlier
