"""Cross-entropy for XLA: all logits at once, or those of one block of tokens after the other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..compat import target_platform
from ..products import transposed_product
from .reference import EXCLUDED
from .shapes import block_tokens


def tokens_per_block(tokens: int, vocab: int) -> int:
    """Tokens per block on this device."""
    return block_tokens(tokens, vocab, target_platform())


def _logits(hidden, weight, allowed, vocab_first) -> Float[Array, "T V"]:
    spec = "td,vd->tv" if vocab_first else "td,dv->tv"
    logits = jnp.einsum(spec, hidden, weight, preferred_element_type=jnp.float32)
    return logits if allowed is None else jnp.where(allowed, logits, EXCLUDED)


def _losses(logits, targets) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    log_total = jax.nn.logsumexp(logits, axis=1)
    return log_total - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0], log_total


def _weighted_sum(token_weight, nll) -> Float[Array, ""]:
    return jnp.sum(jnp.where(token_weight != 0, token_weight * nll, 0.0))


def run_whole(hidden, weight, targets, *, allowed, vocab_first):
    """Holds all logits in float32: small vocabularies."""
    return _whole(vocab_first, hidden, weight, targets, allowed)


def run_whole_weighted(hidden, weight, targets, token_weight, *, allowed, vocab_first):
    """The weighted sum of `run_whole`; gradients are computed in the forward pass."""
    return _whole_weighted(vocab_first, hidden, weight, targets, token_weight, allowed)


def run_blocks(hidden, weight, targets, *, allowed, vocab_first):
    """Holds the logits of one block; the backward pass computes them again."""
    return _tokens(vocab_first, hidden, weight, targets, allowed)


def run_blocks_weighted(hidden, weight, targets, token_weight, *, allowed, vocab_first):
    """Holds the logits of one block; gradients are computed in the forward pass."""
    return _weighted(vocab_first, hidden, weight, targets, token_weight, allowed)


def _split(weight, vocab_first: bool, *by_token: Array) -> tuple[Array, ...]:
    """[T ...] -> [T/C C ...], filled up with zeros."""
    tokens = by_token[0].shape[0]
    size = tokens_per_block(tokens, weight.shape[0 if vocab_first else 1])

    def split(v):
        rest = -tokens % size
        v = jnp.pad(v, ((0, rest),) + ((0, 0),) * (v.ndim - 1)) if rest else v
        return v.reshape(-1, size, *v.shape[1:])

    return tuple(split(v) for v in by_token)


def _joined(blocks: Any, tokens: int) -> Any:
    return jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:])[:tokens], blocks)


def _gradients(
    hidden, weight, targets, logits, log_total, of_nll, of_total, vocab_first
) -> tuple[Float[Array, "C D"], Array]:
    """A block's gradients of hidden and, float32, of weight.

    Args:
        hidden: [C D].
        weight: the head.
        targets: [C].
        logits: [C V].
        log_total: [C].
        of_nll: cotangent of the NLL, float32 [C].
        of_total: cotangent of the log of the denominator, float32 [C].
        vocab_first: the weight's layout.
    """
    hit = jnp.arange(logits.shape[1], dtype=targets.dtype) == targets[:, None]
    spread = jnp.exp(logits - log_total[:, None]) * (of_nll + of_total)[:, None]
    dlogits = (spread - jnp.where(hit, of_nll[:, None], 0.0)).astype(hidden.dtype)
    back = "tv,vd->td" if vocab_first else "tv,dv->td"
    dhidden = jnp.einsum(back, dlogits, weight, preferred_element_type=jnp.float32)
    pair = (dlogits, hidden) if vocab_first else (hidden, dlogits)
    return dhidden.astype(hidden.dtype), transposed_product(*pair, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(vocab_first, hidden, weight, targets, allowed):
    return _losses(_logits(hidden, weight, allowed, vocab_first), targets)


def _whole_forward(vocab_first, hidden, weight, targets, allowed):
    logits = _logits(hidden, weight, allowed, vocab_first)
    nll, log_total = _losses(logits, targets)
    return (nll, log_total), (hidden, weight, targets, logits, log_total)


def _whole_backward(vocab_first, residuals, cotangents):
    dhidden, dweight = _gradients(*residuals, *cotangents, vocab_first)
    return dhidden, dweight.astype(residuals[1].dtype), None, None


_whole.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole_weighted(vocab_first, hidden, weight, targets, token_weight, allowed):
    nll, _ = _whole(vocab_first, hidden, weight, targets, allowed)
    return _weighted_sum(token_weight, nll)


def _whole_weighted_forward(vocab_first, hidden, weight, targets, token_weight, allowed):
    logits = _logits(hidden, weight, allowed, vocab_first)
    nll, log_total = _losses(logits, targets)
    of_total = jnp.zeros_like(token_weight)
    dhidden, dweight = _gradients(
        hidden, weight, targets, logits, log_total, token_weight, of_total, vocab_first
    )
    return _weighted_sum(token_weight, nll), (dhidden, dweight.astype(weight.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokens(vocab_first, hidden, weight, targets, allowed):
    def one_block(block):
        hidden, targets = block
        return _losses(_logits(hidden, weight, allowed, vocab_first), targets)

    losses = lax.map(one_block, _split(weight, vocab_first, hidden, targets))
    return _joined(losses, hidden.shape[0])


def _tokens_forward(vocab_first, hidden, weight, targets, allowed):
    nll, log_total = _tokens(vocab_first, hidden, weight, targets, allowed)
    return (nll, log_total), (hidden, weight, targets, allowed, log_total)


def _tokens_backward(vocab_first, residuals, cotangents):
    hidden, weight, targets, allowed, log_total = residuals

    def one_block(dweight, block):
        hidden, targets, log_total, of_nll, of_total = block
        logits = _logits(hidden, weight, allowed, vocab_first)
        dhidden, added = _gradients(
            hidden, weight, targets, logits, log_total, of_nll, of_total, vocab_first
        )
        return dweight + added, dhidden

    blocks = _split(weight, vocab_first, hidden, targets, log_total, *cotangents)
    dweight, dhidden = lax.scan(one_block, jnp.zeros(weight.shape, jnp.float32), blocks)
    return _joined(dhidden, hidden.shape[0]), dweight.astype(weight.dtype), None, None


_tokens.defvjp(_tokens_forward, _tokens_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(vocab_first, hidden, weight, targets, token_weight, allowed):
    nll, _ = _tokens(vocab_first, hidden, weight, targets, allowed)
    return _weighted_sum(token_weight, nll)


def _weighted_forward(vocab_first, hidden, weight, targets, token_weight, allowed):
    def one_block(carry, block):
        total, dweight = carry
        hidden, targets, token_weight = block
        logits = _logits(hidden, weight, allowed, vocab_first)
        nll, log_total = _losses(logits, targets)
        dhidden, added = _gradients(
            hidden, weight, targets, logits, log_total, token_weight,
            jnp.zeros_like(token_weight), vocab_first,
        )  # fmt: skip
        return (total + _weighted_sum(token_weight, nll), dweight + added), dhidden

    blocks = _split(weight, vocab_first, hidden, targets, token_weight)
    start = (jnp.zeros((), jnp.float32), jnp.zeros(weight.shape, jnp.float32))
    (total, dweight), dhidden = lax.scan(one_block, start, blocks)
    return total, (_joined(dhidden, hidden.shape[0]), dweight.astype(weight.dtype))


def _scaled(vocab_first, residuals, cotangent):
    """The backward pass of a weighted sum whose gradients are there already."""
    del vocab_first
    # In float32: a mean's factor, one over the number of tokens, times a small gradient could leave
    # the range of a 16-bit format before the sum is rounded.
    scaled = ((v.astype(jnp.float32) * cotangent).astype(v.dtype) for v in residuals)
    return (*scaled, None, None, None)


_weighted.defvjp(_weighted_forward, _scaled)
_whole_weighted.defvjp(_whole_weighted_forward, _scaled)
