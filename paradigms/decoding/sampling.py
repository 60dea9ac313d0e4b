"""From logits to ids: the settings of a request, the filters, the draw.

The order of the filters is fixed, and each works on what the one before left over:

    forbidden    ids that are never drawn, and where `allowed` is set, ids that it leaves out
    temperature  divides the logits; 0 means the most probable id
    top_k        the k most probable ids, exactly k; among equals the lower id comes first
    top_p        the shortest run of most probable ids whose probabilities reach p
    min_p        ids at least p times as probable as the most probable one

All numbers are data, one per row: other settings never compile another program. A draw depends on
its row's key, the token's position and the draw's purpose alone, so a row's text does not depend
on the rows beside it or on how many steps run in one call.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from ...errors import ConfigError
from ..backbone import MASKED

FLOOR = -1e20  # scaled logits end here, so that no allowed id falls as low as MASKED
COLDEST = 1e-30  # the lowest temperature beside 0; below it float32 runs out of exponents
STOP_SLOTS = 8  # room for stop ids grows in steps of this, so that few shapes exist
NOISE = (-10.0, 1000.0)  # wider than any Gumbel value in float32: cuts off infinities only


class Purpose(enum.IntEnum):
    """What a random number is for: draws of different purpose at one position are independent."""

    TOKEN = 0
    ORDER = 1
    ACCEPT = 2


class Sampling(NamedTuple):
    """The settings of a batch of requests. Make it with `make_sampling`, which checks them.

    Attributes:
        temperature: float32 (B), 0 for the most probable id.
        top_k: int32 (B), 0 for off.
        top_p: float32 (B), 1 for off.
        min_p: float32 (B), 0 for off.
        steps: int32 (B), model calls for the whole answer, for decodings that take a number of
            steps; 0 where that is not set.
        forbidden: bool (V), ids that are never drawn.
        stop_ids: int32 (n), ids that end a row; -1 in unused places.
        allowed: bool (B V), the ids that each row's next token may be (a grammar's mask), or None
            for no such limit; see `with_allowed`.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    steps: Int[Array, " B"]
    forbidden: Bool[Array, " V"]
    stop_ids: Int[Array, " n"]
    allowed: Bool[Array, "B V"] | None = None


def make_sampling(
    batch: int,
    *,
    vocab_size: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    steps: int | Sequence[int] = 0,
    forbidden_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
) -> Sampling:
    """Checks the settings and spreads them over the rows.

    Args:
        batch: B.
        vocab_size: V, the number of logits (padded ids included; the model's head gives those
            no probability).
        temperature: 0 for the most probable id, else at least 1e-30.
        top_k: 0 for off. More than V is off too.
        top_p: in (0, 1]; 1 for off.
        min_p: in [0, 1]; 0 for off.
        steps: 0 for not set.
        forbidden_ids: never drawn (BOS, PAD, MASK and the like).
        stop_ids: end a row (EOS and the like). An id may be 0.

    Each number may be one for all rows or a sequence of `batch`.

    Returns:
        A `Sampling` of NumPy arrays.

    Raises:
        ConfigError: names the setting, the value and what was wanted.
    """
    if batch < 1:
        raise ConfigError(f"batch: got {batch}, want at least 1")
    rows = {
        "temperature": _floats("temperature", temperature, batch),
        "top_k": _integers("top_k", top_k, batch),
        "top_p": _floats("top_p", top_p, batch),
        "min_p": _floats("min_p", min_p, batch),
        "steps": _integers("steps", steps, batch),
    }
    _require("temperature", rows, lambda v: v == 0 or v >= COLDEST, f"0 or at least {COLDEST}")
    _require("top_k", rows, lambda v: v >= 0, "at least 0 (0 is off)")
    _require("top_p", rows, lambda v: 0 < v <= 1, "more than 0 and at most 1 (1 is off)")
    _require("min_p", rows, lambda v: 0 <= v <= 1, "from 0 to 1 (0 is off)")
    _require("steps", rows, lambda v: v >= 0, "at least 0 (0 is not set)")
    forbidden = np.zeros((vocab_size,), bool)
    forbidden[_ids("forbidden_ids", forbidden_ids, vocab_size)] = True
    if forbidden.all():
        raise ConfigError(f"forbidden_ids: all {vocab_size} ids are forbidden, none is left")
    stops = _ids("stop_ids", stop_ids, vocab_size)
    slots = STOP_SLOTS * max(1, math.ceil(len(stops) / STOP_SLOTS))
    padded = np.full((slots,), -1, np.int32)
    padded[: len(stops)] = stops
    return Sampling(**rows, forbidden=forbidden, stop_ids=padded)


def with_allowed(sampling: Sampling, allowed: np.ndarray) -> Sampling:
    """The same settings with a limit on what each row may draw next.

    The limit is data: another one compiles nothing. Only decodings that draw one token per step
    (`Decoding.one_token`) take it, because it holds for one position.

    Args:
        sampling: the settings.
        allowed: bool (B V). A row for which nothing would be left is the caller's error to report.

    Raises:
        ConfigError: a wrong shape or dtype.
    """
    shape = (sampling.temperature.shape[0], sampling.forbidden.shape[0])
    if allowed.dtype != np.bool_ or allowed.shape != shape:
        raise ConfigError(f"allowed: got {allowed.dtype} {allowed.shape}, want bool {shape}")
    return sampling._replace(allowed=jnp.asarray(allowed))


def filter_logits(
    logits: Float[Array, "B *P V"], sampling: Sampling
) -> Float[Array, "B *P V"]:
    """Applies all filters.

    The best logit is taken as 0 before the temperature divides, so that no temperature overflows.
    Where the temperature is 0, the filters see the logits undivided.

    Args:
        logits: one row of V per position; positions may have any number of axes.
        sampling: settings per row.

    Returns:
        float32, scaled logits; exactly `MASKED` where an id may not be drawn.
    """
    allowed = allowed_ids(logits, sampling)
    logits = jnp.where(allowed, logits.astype(jnp.float32), MASKED)
    logits -= jnp.max(logits, axis=-1, keepdims=True)
    temperature = _spread(sampling.temperature, logits)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    scaled = jnp.where(allowed, jnp.maximum(scaled, FLOOR), MASKED)
    vocab_size = logits.shape[-1]
    top_k, top_p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p)
    needs_order = jnp.any(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))
    scaled = jax.lax.cond(
        needs_order, lambda x: _most_probable(x, sampling), lambda x: x, scaled
    )
    # The best id stays whatever top_k and top_p removed, so this needs no order.
    min_p = _spread(sampling.min_p, logits)
    bound = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), MASKED)
    return jnp.where(scaled >= bound, scaled, MASKED)


def allowed_ids(
    logits: Float[Array, "B *P V"], sampling: Sampling
) -> Bool[Array, "B *P V"]:
    """True for ids that may be drawn.

    These are neither forbidden, nor outside `allowed`, nor excluded by the model (padded ids).
    """
    legal = ~jnp.asarray(sampling.forbidden) & (logits > MASKED / 2)
    if sampling.allowed is None:
        return legal
    allowed = jnp.asarray(sampling.allowed)
    batch, vocab_size = allowed.shape
    return legal & allowed.reshape(batch, *(1,) * (logits.ndim - 2), vocab_size)


def log_probabilities(
    logits: Float[Array, "B *P V"], sampling: Sampling
) -> Float[Array, "B *P V"]:
    """The law that `draw` draws from, float32: nats, `MASKED` where an id may not be drawn.

    At temperature 0 that is certainty of the most probable id.
    """
    filtered = filter_logits(logits, sampling)
    law = jnp.where(filtered > MASKED / 2, jax.nn.log_softmax(filtered, axis=-1), MASKED)
    best = jnp.argmax(filtered, axis=-1)[..., None] == jnp.arange(logits.shape[-1])
    certain = jnp.where(best, 0.0, MASKED)
    return jnp.where(_spread(sampling.temperature, logits) > 0, law, certain)


def draw(
    logits: Float[Array, "B *P V"],
    row_keys: Key[Array, " B"],
    positions: Int[Array, " B *P"],
    purpose: int,
    sampling: Sampling,
) -> Int[Array, " B *P"]:
    """Draws one id per position, by the Gumbel-max rule; at temperature 0 the most probable id.

    Args:
        logits: from the model, unfiltered.
        row_keys: PRNG key of each row.
        positions: index of each drawn token in its row.
        purpose: a `Purpose`.
        sampling: settings per row.

    Returns:
        int32. Of equally probable ids temperature 0 takes the lowest.
    """
    filtered = filter_logits(logits, sampling)
    vocab_size = logits.shape[-1]
    temperature = _spread(sampling.temperature, logits)

    def noise_of(key: Array) -> Array:
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    def with_noise(filtered: Array) -> Array:
        keys = position_keys(row_keys, positions, purpose)
        noise = jax.vmap(noise_of)(keys.reshape(-1)).reshape(filtered.shape)
        noisy = filtered + jnp.clip(noise, *NOISE)
        # Greedy rows ignore the noise; what no row may draw stays far below everything else.
        return jnp.where(temperature > 0, noisy, filtered)

    scores = jax.lax.cond(jnp.any(temperature > 0), with_noise, lambda x: x, filtered)
    return _first_best(scores)


def _first_best(scores: Float[Array, "B *P V"]) -> Int[Array, " B *P"]:
    """`argmax`, as two reductions: XLA's CPU backend takes one over pairs element by element.

    Some id in range where a score is NaN.
    """
    vocab_size = scores.shape[-1]
    best = jax.lax.optimization_barrier(jnp.max(scores, axis=-1, keepdims=True))
    ids = jnp.where(scores == best, jnp.arange(vocab_size, dtype=jnp.int32), vocab_size - 1)
    return jnp.min(ids, axis=-1)


def position_keys(
    row_keys: Key[Array, " B"], positions: Int[Array, " B *P"], purpose: int
) -> Key[Array, " B *P"]:
    """The key of each draw: fold_in(fold_in(row key, position), purpose)."""
    batch = positions.shape[0]
    flat = positions.reshape(batch, -1)

    def one(key: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), int(purpose))

    return jax.vmap(jax.vmap(one, (None, 0)))(row_keys, flat).reshape(positions.shape)


def non_finite(logits: Float[Array, "B *P V"]) -> Bool[Array, " B *P"]:
    """True where some logit is NaN or infinite: a broken model, from which nothing is drawn."""
    return ~jnp.all(jnp.isfinite(logits), axis=-1)


def _most_probable(scaled: Array, sampling: Sampling) -> Array:
    """top_k, then top_p. What they keep is a prefix of the order, so values are sorted once."""
    vocab_size = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(vocab_size)
    top_k, top_p = _spread(sampling.top_k, scaled), _spread(sampling.top_p, scaled)
    keep = rank < jnp.where(top_k > 0, top_k, vocab_size)
    mass = jax.nn.softmax(jnp.where(keep, ordered, MASKED), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    keep &= (top_p >= 1.0) | (before < top_p) | (rank == 0)
    count = jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32)
    last = jnp.take_along_axis(ordered, count - 1, axis=-1)
    above, tied = scaled > last, scaled == last
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    kept = above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room))
    return jnp.where(kept, scaled, MASKED)


def _spread(setting: Any, logits: Array) -> Array:
    """(B) to (B 1 ... 1), to go with (B *P V)."""
    setting = jnp.asarray(setting)
    return setting.reshape(setting.shape[0], *(1,) * (logits.ndim - 1))


def _floats(name: str, value: Any, batch: int) -> np.ndarray:
    array = _row_values(name, value, batch, "iuf", "numbers")
    if not np.isfinite(array).all():
        raise ConfigError(f"{name}: got {value}, want finite numbers")
    return array.astype(np.float32)


def _integers(name: str, value: Any, batch: int) -> np.ndarray:
    array = _row_values(name, value, batch, "iu", "whole numbers")
    return np.minimum(array, np.iinfo(np.int32).max).astype(np.int32)


def _row_values(name: str, value: Any, batch: int, kinds: str, wanted: str) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in kinds:
        raise ConfigError(f"{name}: got {value!r}, want {wanted}")
    if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
        raise ConfigError(
            f"{name}: got shape {array.shape}, want one number or one for each of {batch} rows"
        )
    return np.broadcast_to(array, (batch,)).copy()


def _require(name: str, rows: dict[str, np.ndarray], holds: Any, wanted: str) -> None:
    for value in rows[name].tolist():
        if not holds(value):
            raise ConfigError(f"{name}: got {value:g}, want {wanted}")


def _ids(name: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros((0,), np.int32)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ConfigError(f"{name}: got {ids!r}, want a list of ids")
    for one in array.tolist():
        if not 0 <= one < vocab_size:
            raise ConfigError(f"{name}: got {one}, want ids from 0 to {vocab_size - 1}")
    return array.astype(np.int32)
