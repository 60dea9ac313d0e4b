"""The causal convolution along the paths of a tree of nodes (draft and verify)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .reference import activate


def run_tree(
    x: Float[Array, "B T E"],
    weight: Float[Array, "W E"],
    bias: Float[Array, " E"] | None,
    parents: Int[Array, "B T"],
    *,
    state: Float[Array, "B W-1 E"],
    activation: str | None,
) -> Float[Array, "B T E"]:
    """Convolves along the paths of a tree: a node's window is its parent's, moved by one.

    Slot W-2 of the buffer is the newest carried input, slot W-1+i is node i's; a tap moves to the
    parent's slot for nodes and one slot to the left inside the carried window.
    """
    batch, nodes, _ = x.shape
    width = weight.shape[0]
    parents = parents.astype(jnp.int32)
    buffer = jnp.concatenate([state.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    # Node indices; -1 - j is the j-th newest carried input.
    at = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    for back in range(width):
        y = y + weight[width - 1 - back].astype(jnp.float32) * jnp.take_along_axis(
            buffer, (at + width - 1)[:, :, None], axis=1
        )
        if back < width - 1:
            up = jnp.take_along_axis(parents, jnp.maximum(at, 0), axis=1)
            at = jnp.where(at >= 0, up, at - 1)
    return activate(y, activation).astype(x.dtype)
