"""The public attention op."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ..compat import target_platform
from ..dispatch import Implementation, KernelArgumentError, choose
from . import libraries, pallas_mosaic_gpu, pallas_tpu, pallas_triton
from .mask import AttentionMask
from .reference import attention_reference
from .xla import attention_xla

IMPLEMENTATIONS = {
    "reference": Implementation(attention_reference),
    "xla": Implementation(attention_xla),
    "pallas_tpu": Implementation(pallas_tpu.run, pallas_tpu.supports),
    "pallas_mosaic_gpu": Implementation(pallas_mosaic_gpu.run, pallas_mosaic_gpu.supports),
    "pallas_triton": Implementation(pallas_triton.run, pallas_triton.supports),
    "cudnn": Implementation(libraries.run_cudnn, libraries.supports_cudnn),
    "tokamax": Implementation(libraries.run_tokamax, libraries.supports_tokamax),
}
# By platform, fastest first.
PREFERRED = {
    "cpu": ("xla",),
    "gpu": ("pallas_mosaic_gpu", "pallas_triton", "xla"),
    "tpu": ("pallas_tpu", "xla"),
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over the keys that `mask` makes visible (Vaswani et al. 2017, eq. 1).

    Args:
        q: queries; N is a multiple of K (grouped-query attention, arXiv 2305.13245).
        k: keys, same dtype as q; may hold anything where the mask says nothing was written.
        v: values, likewise.
        mask: the mask rule's vectors.
        scale: factor on the scores; 1/sqrt(H) when None.
        soft_cap: scores become `cap * tanh(scores / cap)` when given.
        implementation: see `genlab.kernels.dispatch`.

    Returns:
        The output, (B T N H) in q's dtype, zeros for a query that sees no key; and the log of the
        softmax denominator, (B T N) float32, -inf there. Two partial results over disjoint key
        sets combine by `merge_attention`.

    Raises:
        KernelArgumentError: shapes that do not fit, or an implementation that cannot run them.
    """
    batch, queries, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        raise KernelArgumentError(f"attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit")
    if heads % k.shape[2]:
        raise KernelArgumentError(
            f"attention: {heads} query heads are no multiple of {k.shape[2]} key/value heads"
        )
    if mask.q_lo.shape != (batch, queries) or mask.k_order.shape != (batch, k.shape[1]):
        raise KernelArgumentError(
            f"attention: mask for queries {mask.q_lo.shape} and keys {mask.k_order.shape}, "
            f"want {(batch, queries)} and {(batch, k.shape[1])}"
        )
    options = {"scale": 1 / math.sqrt(head_dim) if scale is None else scale, "soft_cap": soft_cap}
    preferred = PREFERRED[target_platform()]
    name = choose("attention", IMPLEMENTATIONS, preferred, implementation, q, k, v, mask, **options)
    return IMPLEMENTATIONS[name].run(q, k, v, mask, **options)


def merge_attention(
    out_a: Float[Array, "B T N H"],
    log_total_a: Float[Array, "B T N"],
    out_b: Float[Array, "B T N H"],
    log_total_b: Float[Array, "B T N"],
) -> Float[Array, "B T N H"]:
    """Joins two attention results over disjoint sets of keys, exactly.

    Each is weighted by its share of the joint softmax denominator; a query that sees no key in
    either gets zeros.
    """
    peak = jnp.maximum(log_total_a, log_total_b)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weight_a, weight_b = jnp.exp(log_total_a - peak), jnp.exp(log_total_b - peak)
    total = weight_a + weight_b
    total = jnp.where(total > 0, total, 1.0)
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    joined = share_a * out_a.astype(jnp.float32) + share_b * out_b.astype(jnp.float32)
    return joined.astype(out_a.dtype)
