"""Attention for XLA: grouped heads without repeating keys, scores in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ..compat import target_platform
from ..pallas_common import pad_axis, round_up
from ..products import transposed_product
from . import shapes
from .mask import AttentionMask

_HIDDEN = -1e30  # finite, so that no difference of two is NaN


def attention_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Same function as the reference; the key/value heads are never repeated in memory.

    On a CPU, scores too many for its caches are made for some queries at a time, and again in the
    backward pass, so that main memory never holds them.
    """
    attend = functools.partial(_attend, scale=scale, soft_cap=soft_cap)
    at_once = _queries_at_once(q.shape, k.shape[1])
    if at_once == q.shape[1]:
        return attend(q, k, v, mask)
    batch, queries = q.shape[:2]
    padded = round_up(queries, at_once)

    def cut(x, fill=0):
        if x is None:
            return None
        x = pad_axis(x, 1, padded, fill)
        return jnp.moveaxis(x.reshape(batch, -1, at_once, *x.shape[2:]), 1, 0)

    def some(part):
        q, q_lo, q_hi, q_segment, q_tag, tree = part
        by_query = {"q_lo": q_lo, "q_hi": q_hi, "q_segment": q_segment, "q_tag": q_tag}
        return attend(q, k, v, mask._replace(**by_query, tree=tree))

    parts = (
        cut(q),
        cut(mask.q_lo),
        cut(mask.q_hi),
        cut(mask.q_segment, -1),
        cut(mask.q_tag),
        cut(mask.tree, False),
    )
    found = jax.lax.map(jax.checkpoint(some, prevent_cse=False), parts)
    out, log_total = (
        jnp.moveaxis(x, 0, 1).reshape(batch, padded, *x.shape[3:])[:, :queries] for x in found
    )
    return out, log_total


def _queries_at_once(q_shape: tuple[int, ...], keys: int) -> int:
    """Returns how many queries to score together: all, or what a CPU's nearest caches hold."""
    batch, queries, heads, _ = q_shape
    bytes_per_query = 4 * batch * heads * keys
    if target_platform() != "cpu" or bytes_per_query * queries <= shapes.CPU_SCORES_MAX:
        return queries
    unit = shapes.CPU_QUERIES_UNIT
    return min(queries, max(shapes.CPU_SCORES_AT_ONCE // bytes_per_query // unit, 1) * unit)


def _attend(q, k, v, mask, *, scale, soft_cap):
    """Few rows share a product; otherwise few queries leave keys and values where they are.

    Many queries are worth turning heads outwards.
    """
    if q.shape[1] * q.shape[2] <= shapes.CPU_JOINED_ROWS and target_platform() == "cpu":
        attend = _attend_joined
    else:
        attend = _attend_few if q.shape[1] < shapes.MANY_QUERIES else _attend_many
    return attend(q, k, v, mask, scale=scale, soft_cap=soft_cap)


def _attend_many(q, k, v, mask, *, scale, soft_cap):
    """By heads, with the rule as a term of the scores, made once for all heads.

    On a CPU at T = S = 512 and 12 heads five times as fast as `_attend_few` (docs/performance.md).
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    # Memory that was never written may hold NaN, which no term takes away again.
    written = mask.key_is_written()[:, :, None, None]
    k, v = (jnp.moveaxis(jnp.where(written, x, 0), 2, 1) for x in (k, v))
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, queries, kv_heads, -1, head_dim)
    q = jnp.moveaxis(q, 1, 3)
    term = jnp.where(mask.dense(), 0.0, _HIDDEN)[:, None, None]
    out, log_total = _by_heads(soft_cap, q, k, v, term)
    out = jnp.moveaxis(out, 3, 1).reshape(batch, queries, heads, head_dim)
    return out, jnp.moveaxis(log_total, 3, 1).reshape(batch, queries, heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_heads(soft_cap, q, k, v, term):
    """Q [B K G T H], scaled; k, v [B K S H]; term float32 [B 1 1 T S]."""
    return _by_heads_forward(soft_cap, q, k, v, term)[0]


def _by_heads_forward(soft_cap, q, k, v, term):
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    capped = None
    if soft_cap is not None:
        capped = jnp.tanh(scores / soft_cap)
        scores = soft_cap * capped
    scores = scores + term
    # A row that sees nothing has its peak at the term itself; above it the weights become zero.
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), _HIDDEN / 2)
    weight = jnp.exp(scores - peak)
    total = jnp.sum(weight, axis=-1)
    weight = weight.astype(v.dtype)
    out = jnp.einsum("bkgts,bksh->bkgth", weight, v, preferred_element_type=jnp.float32)
    safe = jnp.where(total > 0, total, 1.0)
    out = (out / safe[..., None]).astype(q.dtype)
    log_total = jnp.where(total > 0, jnp.log(safe) + peak[..., 0], -jnp.inf)
    return (out, log_total), (q, k, v, weight, total, out, capped)


def _by_heads_backward(soft_cap, saved, cotangents):
    """d(score) = p (d(p) - delta), delta = sum_h(out d(out)) - d(log_total); see `flash`.

    The weights are kept undivided, in v's dtype; what they are divided by goes to the cotangents.
    """
    q, k, v, weight, total, out, capped = saved
    dout, dlog_total = cotangents
    batch, kv_heads = q.shape[:2]
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1) - dlog_total
    # A row without keys depends on nothing, whatever its cotangents say.
    delta = jnp.where(total > 0, delta, 0.0)
    total = jnp.where(total > 0, total, 1.0)
    dout = (dout / total[..., None]).astype(v.dtype)
    dweight = jnp.einsum("bkgth,bksh->bkgts", dout, v, preferred_element_type=jnp.float32)
    dscores = weight.astype(jnp.float32) * (dweight - (delta / total)[..., None])
    if capped is not None:
        dscores = dscores * (1 - capped**2)
    dscores = dscores.astype(q.dtype)
    dq = jnp.einsum("bkgts,bksh->bkgth", dscores, k, preferred_element_type=jnp.float32)

    def by_key(left, right):
        """Sums over the rows of all G heads; the narrow factor is the one that is turned."""
        left, right = (x.reshape(batch, kv_heads, -1, x.shape[-1]) for x in (left, right))
        return transposed_product(left, right, jnp.float32).swapaxes(2, 3)

    dk, dv = by_key(q, dscores), by_key(dout, weight)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_by_heads.defvjp(_by_heads_forward, _by_heads_backward)


def _attend_few(q, k, v, mask, *, scale, soft_cap):
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, queries, kv_heads, -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    weight, total, log_total = _softmax(scores, mask.dense()[:, None, None], soft_cap)
    # Memory that was never written may hold NaN, and zero times NaN is NaN.
    v = jnp.where(mask.key_is_written()[:, :, None, None], v, 0)
    weight = weight.astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weight, v, preferred_element_type=jnp.float32)
    out = out / jnp.moveaxis(total, -1, 1)[..., None]
    log_total = jnp.moveaxis(log_total, -1, 1).reshape(batch, queries, heads)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype), log_total


def _attend_joined(q, k, v, mask, *, scale, soft_cap):
    """All heads in one product: each query stands in a row of its own with zeros for other heads.

    Products over heads that lie side by side in memory make XLA's CPU backend copy all keys and
    values with heads turned outwards, in every step. These read them as they lie; the K-fold
    arithmetic is hidden behind that as long as rows are few (docs/performance.md).
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    groups, rows = heads // kv_heads, queries * heads
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, queries, kv_heads, groups, 1, head_dim)
    own = jnp.eye(kv_heads, dtype=bool)[:, None, :, None]
    joined = jnp.where(own, q, 0).reshape(batch, rows, kv_heads * head_dim)
    k, v = (x.reshape(batch, keys, kv_heads * head_dim) for x in (k, v))
    scores = jnp.einsum("bnc,bsc->bns", joined, k, preferred_element_type=jnp.float32)
    visible = jnp.broadcast_to(mask.dense()[:, :, None], (batch, queries, heads, keys))
    weight, total, log_total = _softmax(scores, visible.reshape(batch, rows, keys), soft_cap)
    weight = weight.astype(v.dtype)
    pieces = _pieces(keys, v.dtype)

    def weigh(v):
        w, v = weight.reshape(batch, rows, pieces, -1), v.reshape(batch, pieces, -1, v.shape[-1])
        return jnp.einsum("bnps,bpsc->bpnc", w, v, preferred_element_type=jnp.float32).sum(axis=1)

    # Memory that was never written may hold NaN, and zero times NaN is NaN. Clearing it first would
    # copy all values; that is left to the case where something came out wrong.
    out = weigh(v)
    written = mask.key_is_written()[:, :, None]
    out = jax.lax.cond(
        jnp.all(jnp.isfinite(out)), lambda: out, lambda: weigh(jnp.where(written, v, 0))
    )
    out = out.reshape(batch, queries, kv_heads, groups, kv_heads, head_dim)
    out = jnp.sum(jnp.where(own, out, 0), axis=4).reshape(batch, queries, heads, head_dim)
    out = out / total.reshape(batch, queries, heads, 1)
    return out.astype(q.dtype), log_total.reshape(batch, queries, heads)


def _softmax(scores, visible, soft_cap):
    """Weights, their sums over the last axis (1 where nothing is visible) and the sums' logs."""
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # The floor is finite so that a row without any visible key gives weights of zero, not NaN.
    scores = jnp.where(visible, scores, _HIDDEN)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weight = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = jnp.sum(weight, axis=-1)
    safe = jnp.where(total > 0, total, 1.0)
    log_total = jnp.where(total > 0, jnp.log(safe) + peak[..., 0], -jnp.inf)
    return weight, safe, log_total


def _pieces(keys: int, dtype: jnp.dtype) -> int:
    """In how many equal pieces to sum over the keys: a product of bfloat16 slows down with them."""
    if dtype != jnp.bfloat16 or keys < shapes.CPU_LONG_KEYS:
        return 1
    return max(n for n in range(1, shapes.CPU_KEY_PIECES + 1) if keys % n == 0)
