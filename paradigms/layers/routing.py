"""Which experts each token goes to, what that costs the loss, and how rows are sorted by expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int


class Routing(NamedTuple):
    """The choice for each of T tokens.

    Attributes:
        experts: int32 (T k), best first; of equal ones the lower index comes first.
        gates: float32 (T k), what their outputs are multiplied with.
        probs: float32 (T E), softmax over all experts.
        log_total: float32 (T), log of that softmax's denominator.
    """

    experts: Int[Array, "T k"]
    gates: Float[Array, "T k"]
    probs: Float[Array, "T E"]
    log_total: Float[Array, " T"]


def route(
    x: Float[Array, "T D"], w_router: Float[Array, "D E"], top_k: int, *, normalize: bool
) -> Routing:
    """Chooses the `top_k` experts of the highest logits `x @ w_router`, in float32.

    Args:
        x: tokens; converted to float32, since rounding would change who is chosen.
        w_router: float32.
        top_k: experts per token.
        normalize: True makes the gates a softmax over the chosen experts (Mixtral, arXiv
            2401.04088, eq. 1); False takes the chosen entries of the softmax over all (Switch,
            arXiv 2101.03961, eq. 1-2, and Jamba).
    """
    logits = jnp.dot(x.astype(jnp.float32), w_router, precision=jax.lax.Precision.HIGHEST)
    chosen, experts = jax.lax.top_k(logits, top_k)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    probs = jnp.exp(logits - log_total[:, None])
    if normalize:
        gates = jax.nn.softmax(chosen, axis=-1)
    else:
        gates = jnp.exp(chosen - log_total[:, None])
    return Routing(experts, gates, probs, log_total)


class Groups(NamedTuple):
    """Assignments (T k, flattened) sorted by expert.

    Attributes:
        order: int32 (R), the assignment at each sorted place; those of padding come last.
        place: int32 (R), the inverse: the sorted place of each assignment.
        sizes: int32 (E), real assignments per expert.
    """

    order: Int[Array, " R"]
    place: Int[Array, " R"]
    sizes: Int[Array, " E"]


def group_by_expert(
    experts: Int[Array, "T k"], valid: Bool[Array, " T"], num_experts: int
) -> Groups:
    """Sorts the assignments of real tokens by expert; padding belongs to none."""
    wanted = jnp.where(valid[:, None], experts, num_experts).reshape(-1)
    order = jnp.argsort(wanted, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    of_expert = wanted[:, None] == jnp.arange(num_experts, dtype=wanted.dtype)
    return Groups(order, place, jnp.sum(of_expert, axis=0, dtype=jnp.int32))


@jax.custom_vjp
def permute(
    rows: Float[Array, "R D"], order: Int[Array, " R"], inverse: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """`rows[order]` for a permutation, whose gradient is a gather by `inverse`, not a scatter."""
    del inverse
    return rows[order]


def _permute_forward(rows: Array, order: Array, inverse: Array) -> tuple[Array, tuple]:
    return rows[order], (order, inverse)


def _permute_backward(saved: tuple, d_rows: Array) -> tuple[Array, np.ndarray, np.ndarray]:
    order, inverse = saved
    none = np.zeros(order.shape, jax.dtypes.float0)
    return d_rows[inverse], none, none


permute.defvjp(_permute_forward, _permute_backward)


def balance(
    probs: Float[Array, "T E"], sizes: Int[Array, " E"], valid: Bool[Array, " T"]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """How evenly the experts are used by the real tokens.

    Args:
        probs: the router's softmax.
        sizes: assignments per expert.
        valid: which tokens are real.

    Returns:
        The load-balancing loss `E sum_e f_e P_e` (Switch, arXiv 2101.03961, eq. 4-6; f_e is the
        expert's share of all assignments, P_e its mean probability): 1 when balanced, whatever
        top_k is. And statistics: `router_entropy` (mean, nats), `max_load` (the largest f_e times
        E), `unused_experts` (their number).
    """
    num_experts = probs.shape[1]
    counts = sizes.astype(jnp.float32)
    share = counts / jnp.maximum(jnp.sum(counts), 1.0)
    loss = num_experts * jnp.sum(share * mean_over(probs, valid))
    entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=1)
    stats = {
        "router_entropy": mean_over(entropy, valid),
        "max_load": num_experts * jnp.max(share),
        "unused_experts": jnp.sum(sizes == 0, dtype=jnp.float32),
    }
    return loss, {name: jax.lax.stop_gradient(value) for name, value in stats.items()}


def mean_over(values: Float[Array, " T *more"], valid: Bool[Array, " T"]) -> Float[Array, "*more"]:
    """Mean over the real tokens; 0 where there are none."""
    mask = valid.reshape(-1, *[1] * (values.ndim - 1))
    count = jnp.sum(valid, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0.0), axis=0) / jnp.maximum(count, 1.0)


def expected_distinct(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected number of different experts that `tokens` tokens choose, each `top_k` at random.

    `E (1 - (1 - k/E)^tokens)`: an expert is left out when every token leaves it out.
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
