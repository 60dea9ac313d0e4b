"""Paged attention for XLA: some blocks of every row at a time, joined as flash attention does.

Only the blocks of one step are ever gathered, in the pool's dtype, and only as many steps are taken
as the rows' lengths ask for.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ..attention.flash import FLOOR
from ..pallas_common import pad_axis, round_up
from . import shapes
from .plan import Plan


class _Sums(NamedTuple):
    """What is known of each query after some steps, float32 (B K G T ...)."""

    values: Array  # H, not yet divided
    peak: Array
    total: Array


def paged_attention_xla(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "pool block K H"],
    v_pool: Float[Array, "pool block K H"],
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Same function as the reference."""
    batch, queries, heads, head_dim = q.shape
    block, kv_heads = k_pool.shape[1:3]
    at_once = _blocks_at_once(batch, k_pool, plan.table.shape[1])
    keys = at_once * block
    table = pad_axis(plan.table, 1, round_up(plan.table.shape[1], at_once))
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, queries, kv_heads, -1, head_dim)
    of_query = (batch, kv_heads, q.shape[3], queries)
    sums = _Sums(
        jnp.zeros((*of_query, head_dim), jnp.float32),
        jnp.full(of_query, FLOOR, jnp.float32),
        jnp.zeros(of_query, jnp.float32),
    )
    step = functools.partial(_step, q, k_pool, v_pool, plan, table, at_once, soft_cap)
    if table.shape[1] == at_once:
        sums = step(jnp.int32(0), sums)
    else:
        some = plan.stop > plan.start
        first = jnp.min(jnp.where(some, plan.start, table.shape[1] * block), initial=0) // keys
        behind = -(-jnp.max(plan.stop, initial=0) // keys)
        sums = jax.lax.fori_loop(first, behind, step, sums)
    safe = jnp.where(sums.total > 0, sums.total, 1.0)
    out = jnp.moveaxis(sums.values / safe[..., None], 3, 1)
    log_total = jnp.where(sums.total > 0, jnp.log(safe) + sums.peak, -jnp.inf)
    log_total = jnp.moveaxis(log_total, 3, 1).reshape(batch, queries, heads)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype), log_total


def _blocks_at_once(batch: int, pool: Array, blocks: int) -> int:
    """Returns how many blocks of each row to gather together."""
    bytes_per_block = batch * pool.dtype.itemsize * pool[0].size
    return max(1, min(blocks, shapes.XLA_BYTES // max(bytes_per_block, 1)))


def _step(q, k_pool, v_pool, plan, table, at_once, soft_cap, n, sums: _Sums) -> _Sums:
    """Takes the n-th `at_once` blocks of every row into the sums."""
    batch = table.shape[0]
    blocks = jax.lax.dynamic_slice_in_dim(table, n * at_once, at_once, axis=1)
    k, v = (pool[blocks].reshape(batch, -1, *pool.shape[2:]) for pool in (k_pool, v_pool))
    position = n * k.shape[1] + jnp.arange(k.shape[1], dtype=jnp.int32)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = (plan.lo[:, :, None] <= position) & (position <= plan.hi[:, :, None])
    visible = visible[:, None, None]
    scores = jnp.where(visible, scores, FLOOR)
    peak = jnp.maximum(sums.peak, jnp.max(scores, axis=-1))
    weight = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0.0)
    fade = jnp.exp(sums.peak - peak)
    # Memory that was never written may hold NaN, and zero times NaN is NaN.
    read = (plan.start[:, None] <= position) & (position < plan.stop[:, None])
    v = jnp.where(read[:, :, None, None], v, 0)
    more = jnp.einsum(
        "bkgts,bskh->bkgth", weight.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return _Sums(
        sums.values * fade[..., None] + more,
        peak,
        sums.total * fade + jnp.sum(weight, axis=-1),
    )
