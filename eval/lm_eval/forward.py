"""What is compiled for scoring: log-probabilities at picked positions of padded rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from ...paradigms.backbone import MASKED
from ...paradigms.context import Context
from ...paradigms.masks import Causal, Full
from ...paradigms.model import Model

POSITIONS_AT_ONCE = 32  # of a row, whose logits are held at the same time


@partial(jax.jit, static_argnames=("paradigm",))
def score_causal(
    model: Model,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    paradigm: Any,
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Sums where each position predicts its target from what stands up to it.

    Args:
        model: ready to compute.
        tokens: int32 (B T).
        targets: int32 (B T), what each position predicts.
        scored: bool (B T), the positions that count.
        lengths: int32 (B), ids of each row that are no padding.
        paradigm: None.

    Returns:
        Log-likelihoods in nats, and whether every scored target is the most probable id.
    """
    del paradigm
    out, _ = model(tokens, ctx=Context(lengths=lengths, mask=Causal()))
    return _sums(model, out.hidden, targets, scored, None)


@partial(jax.jit, static_argnames=("paradigm",))
def score_hidden(
    model: Model,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    paradigm: Any,
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Sums where the scored tokens are hidden and predicted from all the others.

    Args: see `score_causal`; a target is the token in its own place.
        paradigm: masked diffusion.
    """
    noisy = jnp.where(scored, paradigm.mask_id, tokens)
    out, _ = model(noisy, ctx=Context(lengths=lengths, mask=Full()))
    hidden = jnp.roll(out.hidden, 1, axis=1) if paradigm.shift else out.hidden
    return _sums(model, hidden, targets, scored, paradigm.mask_id)


@partial(jax.jit, static_argnames=("paradigm",))
def score_choices(
    model: Model,
    tokens: Int[Array, "B T"],
    choices: Int[Array, "B A"],
    lengths: Int[Array, " B"],
    *,
    paradigm: Any,
) -> tuple[Float[Array, "B A"], Int[Array, " B"]]:
    """Log-probabilities of several ids in the one place behind each row.

    Args:
        model: ready to compute.
        tokens: int32 (B T), contexts; in diffusion each ends with the hidden place.
        choices: int32 (B A).
        lengths: int32 (B), ids of each row that are no padding.
        paradigm: masked diffusion; None where positions predict what follows them.

    Returns:
        Nats, and the most probable id.
    """
    mask = Causal() if paradigm is None else Full()
    out, _ = model(tokens, ctx=Context(lengths=lengths, mask=mask))
    place = lengths - 1
    if paradigm is not None and paradigm.shift:
        place -= 1
    last = jnp.take_along_axis(out.hidden, place[:, None, None], axis=1)[:, 0]
    log_probs = _log_probs(model, last, None if paradigm is None else paradigm.mask_id)
    return jnp.take_along_axis(log_probs, choices, axis=1), jnp.argmax(log_probs, axis=1)


def _log_probs(
    model: Model, hidden: Float[Array, "*B D"], banned: int | None
) -> Float[Array, "*B V"]:
    """The head's log-probabilities; the id `banned` has none."""
    logits = model.head(hidden)
    if banned is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) == banned, MASKED, logits)
    return jax.nn.log_softmax(logits)


def _sums(
    model: Model,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
    banned: int | None,
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Sums log-probabilities over the scored positions, whose logits are made in pieces.

    Only as many pieces are made as the row with the most scored positions needs. The id `banned`
    has no probability.
    """
    rows, width = scored.shape
    order = jnp.argsort(~scored, axis=1, stable=True)  # scored positions first
    counts = jnp.sum(scored, axis=1, dtype=jnp.int32)
    piece = min(POSITIONS_AT_ONCE, width)

    def add(number: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        total, best = sums
        place = number * piece + jnp.arange(piece)
        counted = place < counts[:, None]
        at = jnp.take_along_axis(order, jnp.minimum(place, width - 1)[None], axis=1)
        wanted = jnp.take_along_axis(targets, at, axis=1)
        picked = jnp.take_along_axis(hidden, at[..., None], axis=1)
        log_probs = _log_probs(model, picked, banned)
        own = jnp.take_along_axis(log_probs, wanted[..., None], axis=2)[..., 0]
        total += jnp.sum(jnp.where(counted, own, 0.0), axis=1)
        best &= jnp.all((jnp.argmax(log_probs, axis=2) == wanted) | ~counted, axis=1)
        return total, best

    start = (jnp.zeros((rows,), jnp.float32), jnp.ones((rows,), bool))
    pieces = -(-jnp.max(counts) // piece)
    return jax.lax.fori_loop(0, pieces, add, start)
