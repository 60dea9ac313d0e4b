"""What the flash-attention kernels share: heads as rows, and the derivative around the kernels.

Dao 2023, arXiv 2307.08691: the forward kernel keeps nothing of size T S; the backward kernels
compute the probabilities again from the log of each row's denominator. That log is a result of its
own here (`merge_attention` reads it), so its cotangent enters: with p the probabilities,
d(score) = p (d(p) - delta), delta = sum_h(out d(out)) - d(log_total).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .mask import AttentionMask

# Scores of keys that are not visible. Finite, so that a row without keys gives 0 and not NaN.
FLOOR = -1e30


class Options(NamedTuple):
    """Static numbers of one call.

    Attributes:
        scale: factor on the scores.
        soft_cap: scores become `cap * tanh(scores / cap)`; None leaves them.
        groups: G.
        sizes: the backend's own block sizes.
    """

    scale: float
    soft_cap: float | None
    groups: int
    sizes: Any


class Kernels(NamedTuple):
    """A backend.

    Attributes:
        forward: (options, q, k, v, mask) to (out, log_total): q and out (B R K H), k and v
            (B S K H), log_total float32 (B K R), -inf for a row that sees nothing.
        backward: (options, q, k, v, mask, d_out, log_total, delta) to (dq, dk, dv); here log_total
            is finite, and delta float32 (B K R).
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


def flash_attention(
    kernels: Kernels, options: Options, q: Array, k: Array, v: Array, mask: AttentionMask
) -> tuple[Array, Array]:
    """Attention by a backend's kernels; arguments and results of the op. Differentiable once."""
    out, log_total = _flash(kernels, options, fold(q, k.shape[2]), k, v, mask)
    return unfold(out, log_total, q.shape)


def fold(q: Array, kv_heads: int) -> Array:
    """Lays the query heads of a key/value head out as rows: (B T N H) to (B R K H), R = T G."""
    batch, queries, heads, head_dim = q.shape
    groups = heads // kv_heads
    rows = q.reshape(batch, queries, kv_heads, groups, head_dim).swapaxes(2, 3)
    return rows.reshape(batch, queries * groups, kv_heads, head_dim)


def unfold(out: Array, log_total: Array, q_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The way back: (B R K H) and (B K R) to (B T N H), which is `q_shape`, and (B T N)."""
    batch, queries, heads, head_dim = q_shape
    kv_heads = out.shape[2]
    groups = heads // kv_heads
    out = out.reshape(batch, queries, groups, kv_heads, head_dim).swapaxes(2, 3)
    log_total = log_total.reshape(batch, kv_heads, queries, groups).swapaxes(1, 2)
    return out.reshape(q_shape), log_total.reshape(batch, queries, heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(kernels, options, q, k, v, mask):
    return kernels.forward(options, q, k, v, mask)


def _flash_forward(kernels, options, q, k, v, mask):
    out, log_total = kernels.forward(options, q, k, v, mask)
    return (out, log_total), (q, k, v, mask, out, log_total)


def _flash_backward(kernels, options, saved, cotangents):
    q, k, v, mask, out, log_total = saved
    d_out, d_log_total = cotangents
    some = jnp.isfinite(log_total)
    delta = jnp.einsum(
        "brkh,brkh->bkr",
        out.astype(jnp.float32),
        d_out.astype(jnp.float32),
        precision="highest",
    )
    # A row without keys depends on nothing, whatever its cotangents say.
    delta = jnp.where(some, delta - d_log_total, 0.0)
    log_total = jnp.where(some, log_total, 0.0)
    dq, dk, dv = kernels.backward(options, q, k, v, mask, d_out, log_total, delta)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_flash.defvjp(_flash_forward, _flash_backward)


def split_count(programs: int, wanted: int, blocks: int) -> int:
    """In how many equal parts to cut `blocks` blocks of keys so that `wanted` programs run.

    Args:
        programs: how many there are without a cut.
        wanted: how many fill the chip.
        blocks: blocks of keys; a part holds at least one, and parts are equal.
    """
    want = min(-(-wanted // programs), blocks)
    return max(n for n in range(1, want + 1) if blocks % n == 0)


def merge_splits(out: Array, log_total: Array) -> tuple[Array, Array]:
    """Joins results over disjoint parts of the keys.

    Args:
        out: (B P R K H), any float dtype.
        log_total: (B P K R), float32.

    Returns:
        (B R K H) in float32, and (B K R).
    """
    peak = jnp.max(log_total, axis=1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weight = jnp.exp(log_total - peak)
    total = jnp.sum(weight, axis=1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    share = jnp.moveaxis(weight / safe, 2, 3)[..., None]
    joined = jnp.sum(share * out.astype(jnp.float32), axis=1)
    return joined, jnp.where(total > 0, jnp.log(safe) + peak, -jnp.inf)[:, 0]
