"""SSD over a tree of nodes (draft and verify), in the matrix form."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .xla import einsum, skip


def run_tree(x, dt, A, B, C, parents, *, D, state):
    """Runs the matrix form over a tree: L holds the decay along the path instead of the interval.

    It needs no state per node: 64 nodes of a 140M Mamba-2 would take 50 MB per row and layer.
    Arguments and results as in `api.ssd_tree`.
    """
    batch, nodes, heads, channels = x.shape
    groups, states = B.shape[2:]
    x32, dt32, A32, B32, C32 = (v.astype(jnp.float32) for v in (x, dt, A, B, C))
    above = ancestors(parents)
    logs = (dt32 * A32).reshape(batch, nodes, groups, -1)
    strictly = above - jnp.eye(nodes)
    # The nodes on the path (s, t] are those below s (but not s) and above or at t.
    log_decay = einsum("btr,brs,brgh->bghts", above, strictly, logs)
    decay = jnp.exp(jnp.where(above[:, None, None] > 0, log_decay, -jnp.inf))
    from_start = jnp.exp(einsum("btr,brgh->btgh", above, logs))
    u = (dt32[..., None] * x32).reshape(batch, nodes, groups, -1, channels)
    scores = einsum("btgm,bsgm->bgts", C32, B32)
    y = einsum("bghts,bsghp->btghp", scores[:, :, None] * decay, u)
    h = state.reshape(batch, groups, heads // groups, channels, states)
    y = y + einsum("btgm,bghpm->btghp", C32, h) * from_start[..., None]
    return skip(y.reshape(x.shape), x32, D).astype(x.dtype)


def ancestors(parents: Int[Array, "B T"]) -> Float[Array, "B T T"]:
    """Returns 1.0 at [b, t, s] where s is t or one of its ancestors (path doubling)."""
    nodes = parents.shape[1]
    is_parent = parents.astype(jnp.int32)[:, :, None] == jnp.arange(nodes, dtype=jnp.int32)
    reach = jnp.eye(nodes) + is_parent.astype(jnp.float32)
    for _ in range(max(nodes - 2, 0).bit_length()):
        reach = jnp.minimum(einsum("btr,brs->bts", reach, reach), 1.0)
    return reach
