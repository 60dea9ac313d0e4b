"""Attention by other people's kernels, for those who want or compare them: cuDNN and tokamax.

They never run by default. Neither takes the mask as vectors: the rule is written out as a matrix
(B 1 T S). Neither leaves unwritten memory alone, so keys and values are copied with zeros there.
And neither returns the log of the denominator so that it has a gradient (cuDNN's is rounded to
q's dtype, its cotangent is dropped): it is computed by XLA, at the cost of all scores, which a
compiler leaves out where nobody uses it, as in training.
"""

import importlib.util

import jax
import jax.numpy as jnp

from ..compat import target_platform
from ..dispatch import KernelArgumentError, refuse_platform
from . import shapes
from .xla import attention_xla


def supports_cudnn(q, k, v, mask, *, soft_cap, **_) -> str | None:
    """Returns why cuDNN cannot run, or None."""
    del v, mask
    if (reason := refuse_platform("gpu")) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; cuDNN takes bfloat16 or float16"
    if q.shape[3] % 8 or q.shape[3] > shapes.CUDNN_HEAD_MAX:
        return f"H is {q.shape[3]}; cuDNN takes multiples of 8 up to {shapes.CUDNN_HEAD_MAX}"
    if q.shape[1] % 2 or k.shape[1] % 2:
        return f"T is {q.shape[1]} and S {k.shape[1]}; with a mask cuDNN takes even ones"
    if soft_cap is not None:
        return "cuDNN has no soft cap"
    return None if cudnn_found() else "JAX finds no cuDNN here"


def cudnn_found() -> bool:
    """Whether JAX was built for CUDA and finds cuDNN; only a program that runs needs it."""
    from jax._src.lib import cuda_versions

    return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0


def run_cudnn(q, k, v, mask, *, scale, soft_cap):
    """Runs cuDNN. Arguments and results as in `reference`."""

    def attend(q, k, v, visible):
        return jax.nn.dot_product_attention(
            q, k, v, mask=visible, scale=float(scale), implementation="cudnn"
        )

    return _run(attend, q, k, v, mask, scale=scale, soft_cap=soft_cap)


def supports_tokamax(q, k, v, mask, **_) -> str | None:
    """Returns why tokamax cannot run, or None."""
    del q, k, v, mask
    if target_platform() == "cpu":
        return "its kernels need a GPU or TPU; this program is for a CPU"
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    return None


def run_tokamax(q, k, v, mask, *, scale, soft_cap):
    """Runs the first of tokamax's own kernels that takes these arguments.

    Raises:
        KernelArgumentError: none does.
    """
    import tokamax

    kernels = {"gpu": ("mosaic", "triton"), "tpu": ("mosaic",)}[target_platform()]

    def attend(q, k, v, visible):
        try:
            return tokamax.dot_product_attention(
                q,
                k,
                v,
                mask=visible,
                scale=float(scale),
                logits_soft_cap=soft_cap,
                implementation=kernels,
            )
        except* NotImplementedError as group:
            reasons = "; ".join(str(e) for e in group.exceptions)
            raise KernelArgumentError(f"attention: tokamax: {reasons}") from None

    return _run(attend, q, k, v, mask, scale=scale, soft_cap=soft_cap)


def _run(attend, q, k, v, mask, *, scale, soft_cap):
    written = mask.key_is_written()[:, :, None, None]
    k, v = (jnp.where(written, x, jnp.zeros_like(x)) for x in (k, v))
    visible = mask.dense()
    out = attend(q, k, v, visible[:, None])
    # Without a visible key they return a mean over all of them.
    out = jnp.where(jnp.any(visible, axis=2)[:, :, None, None], out, jnp.zeros_like(out))
    return out, attention_xla(q, k, v, mask, scale=scale, soft_cap=soft_cap)[1]
