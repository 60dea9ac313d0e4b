"""The selective scan over a tree of nodes (draft and verify)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .xla import finish


def run_tree(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "E M"],
    B: Float[Array, "B T M"],
    C: Float[Array, "B T M"],
    parents: Int[Array, "B T"],
    *,
    D: Float[Array, " E"] | None,
    z: Float[Array, "B T E"] | None,
    state: Float[Array, "B E M"],
) -> Float[Array, "B T E"]:
    """Computes the same recurrence where a node's predecessor is `parents`, not the step before.

    The states of all nodes are kept: slot 0 is the carried state, slot i + 1 is node i's.
    """
    batch, nodes, inner = x.shape
    x32, dt32, A32, B32, C32 = (v.astype(jnp.float32) for v in (x, dt, A, B, C))
    rows = jnp.arange(batch)
    slots = jnp.zeros((nodes + 1, batch, inner, A.shape[1]), jnp.float32).at[0].set(state)

    def step(slots, at_node):
        i, x_i, dt_i, B_i, C_i, parent = at_node
        h = slots[parent + 1, rows]
        h = jnp.exp(dt_i[:, :, None] * A32) * h + (dt_i * x_i)[:, :, None] * B_i[:, None, :]
        return slots.at[i + 1].set(h), jnp.sum(h * C_i[:, None, :], axis=-1)

    parents = parents.astype(jnp.int32)
    over_nodes = tuple(jnp.moveaxis(v, 1, 0) for v in (x32, dt32, B32, C32, parents))
    _, y = jax.lax.scan(step, slots, (jnp.arange(nodes), *over_nodes))
    y = jnp.moveaxis(y, 0, 1)
    return finish(y, x32, D, z, x.dtype)
