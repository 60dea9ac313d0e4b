"""Cross-entropy from the equation, in float32, with all logits in memory."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EXCLUDED = -1e30  # the logit of a column that has no probability


def logits_of(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "V D"] | Float[Array, "D V"],
    allowed: Bool[Array, " V"] | None,
    vocab_first: bool,
) -> Float[Array, "T V"]:
    """`hidden weight`, float32, `EXCLUDED` in the columns that have no probability."""
    weight = weight.astype(jnp.float32)
    weight = weight.T if vocab_first else weight
    logits = jnp.matmul(hidden.astype(jnp.float32), weight, precision="highest")
    return logits if allowed is None else jnp.where(allowed, logits, EXCLUDED)


def run(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " T"],
    *,
    allowed: Bool[Array, " V"] | None,
    vocab_first: bool,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """-log softmax(hidden weight)[target] and the log of the softmax denominator, float32."""
    logits = logits_of(hidden, weight, allowed, vocab_first)
    peak = jnp.max(logits, axis=1, keepdims=True)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=1)) + peak[:, 0]
    return log_total - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0], log_total


def run_weighted(hidden, weight, targets, token_weight, *, allowed, vocab_first):
    """The sum of token_weight * NLL over the tokens of weight above 0."""
    nll, _ = run(hidden, weight, targets, allowed=allowed, vocab_first=vocab_first)
    return jnp.sum(jnp.where(token_weight != 0, token_weight * nll, 0.0))
