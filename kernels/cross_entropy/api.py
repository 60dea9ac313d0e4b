"""The public cross-entropy: checks and the choice of an implementation."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import Implementation, KernelArgumentError, check_array, choose
from . import reference, xla

_OP = "cross_entropy"


class Pair(NamedTuple):
    """One way of computing both forms of the op."""

    tokens: Implementation
    weighted: Implementation


PAIRS = {
    "reference": Pair(Implementation(reference.run), Implementation(reference.run_weighted)),
    "xla": Pair(Implementation(xla.run_whole), Implementation(xla.run_whole_weighted)),
    "xla_blocks": Pair(Implementation(xla.run_blocks), Implementation(xla.run_blocks_weighted)),
}
IMPLEMENTATIONS: dict[str, Implementation] = {k: pair.tokens for k, pair in PAIRS.items()}
WEIGHTED: dict[str, Implementation] = {k: pair.weighted for k, pair in PAIRS.items()}


def cross_entropy(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " T"],
    *,
    allowed: Bool[Array, " V"] | None = None,
    vocab_first: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """-log softmax(hidden weight)[target] of each token, in nats.

    Logits are float32 sums whatever the inputs' dtype. `xla_blocks` keeps the logits of one block
    of tokens at a time and computes them again in the backward pass: neither direction holds [T V].
    In a sum whose weights are known beforehand (training), `weighted_cross_entropy` spares that
    second computation.

    Args:
        hidden: outputs of the last norm.
        weight: the head; [V D] with `vocab_first` (a tied embedding), else [D V].
        targets: the ids to predict, below V. Values are data, so they are not checked.
        allowed: False for ids without probability (padded ids, the mask); None allows all.
        vocab_first: which axis of `weight` is the vocabulary.
        implementation: see `kernels.dispatch`.

    Returns:
        The NLL and the log of the softmax denominator, float32. Both are differentiable in hidden
        and weight, in reverse mode; the cotangent of the logits is rounded to hidden's dtype.

    Raises:
        KernelArgumentError: a shape, dtype or implementation is wrong.
    """
    _check(hidden, weight, targets, allowed, vocab_first)
    options = dict(allowed=allowed, vocab_first=vocab_first)
    preferred = _preferred(hidden, weight, vocab_first)
    arguments = (hidden, weight, targets)
    name = choose(_OP, IMPLEMENTATIONS, preferred, implementation, *arguments, **options)
    return IMPLEMENTATIONS[name].run(*arguments, **options)


def weighted_cross_entropy(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " T"],
    token_weight: Float[Array, " T"],
    *,
    allowed: Bool[Array, " V"] | None = None,
    vocab_first: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, ""]:
    """The sum over tokens of `token_weight` times the NLL of `cross_entropy`, in nats.

    As the weights are known in the forward pass, `xla_blocks` computes the gradients there, block
    by block, from logits that are computed once. Without differentiation it does not.

    Args:
        hidden: outputs of the last norm.
        weight: the head, see `cross_entropy`.
        targets: the ids to predict; those of tokens of weight 0 may be any.
        token_weight: float32; a token of weight 0 adds nothing. No gradient flows into it.
        allowed: see `cross_entropy`.
        vocab_first: see `cross_entropy`.
        implementation: see `kernels.dispatch`.

    Returns:
        The sum, float32; differentiable in hidden and weight, in reverse mode.

    Raises:
        KernelArgumentError: a shape, dtype or implementation is wrong.
    """
    _check(hidden, weight, targets, allowed, vocab_first)
    check_array(_OP, "token_weight", token_weight, (hidden.shape[0],), "float32")
    options = dict(allowed=allowed, vocab_first=vocab_first)
    preferred = _preferred(hidden, weight, vocab_first)
    arguments = (hidden, weight, targets, token_weight)
    name = choose(_OP, WEIGHTED, preferred, implementation, *arguments, **options)
    return WEIGHTED[name].run(*arguments, **options)


def _preferred(hidden, weight, vocab_first: bool) -> tuple[str, ...]:
    """Names for these sizes, fastest first: logits that fit one block are kept."""
    tokens, vocab = hidden.shape[0], weight.shape[0 if vocab_first else 1]
    return ("xla_blocks",) if xla.tokens_per_block(tokens, vocab) < tokens else ("xla",)


def _check(hidden, weight, targets, allowed, vocab_first) -> None:
    check_array(_OP, "hidden", hidden, "T D")
    check_array(_OP, "weight", weight, "V D" if vocab_first else "D V")
    tokens, width = hidden.shape
    vocab = weight.shape[0 if vocab_first else 1]
    wanted = (vocab, width) if vocab_first else (width, vocab)
    check_array(_OP, "weight", weight, wanted)
    if weight.dtype != hidden.dtype:
        raise KernelArgumentError(
            f"{_OP}: weight has dtype {jnp.dtype(weight.dtype)}; want hidden's, {hidden.dtype}"
        )
    check_array(_OP, "targets", targets, (tokens,), "integer")
    if vocab == 0:
        raise KernelArgumentError(f"{_OP}: weight {weight.shape} has no vocabulary")
    if allowed is not None:
        check_array(_OP, "allowed", allowed, (vocab,), "bool")
