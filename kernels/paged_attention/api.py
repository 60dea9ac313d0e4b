"""The public op: checks, the plan, and the choice of an implementation."""

import functools
import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ..compat import target_platform
from ..dispatch import Implementation, KernelArgumentError, check_array, choose
from . import pallas_mosaic_gpu, pallas_tpu, pallas_triton
from .plan import Plan, make_plan
from .reference import paged_attention_reference
from .xla import paged_attention_xla

_OP = "paged_attention"

IMPLEMENTATIONS = {
    "reference": Implementation(paged_attention_reference),
    "xla": Implementation(paged_attention_xla),
    "pallas_tpu": Implementation(pallas_tpu.run, pallas_tpu.supports),
    "pallas_mosaic_gpu": Implementation(pallas_mosaic_gpu.run, pallas_mosaic_gpu.supports),
    "pallas_triton": Implementation(pallas_triton.run, pallas_triton.supports),
}
# By platform, fastest first.
PREFERRED = {
    "cpu": ("xla",),
    "gpu": ("pallas_mosaic_gpu", "pallas_triton", "xla"),
    "tpu": ("pallas_tpu", "xla"),
}


class _Options(NamedTuple):
    """Static numbers of one call."""

    scale: float
    soft_cap: float | None


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "pool block K H"],
    v_pool: Float[Array, "pool block K H"],
    table: Int[Array, "B blocks"],
    lengths: Int[Array, " B"],
    *,
    offsets: Int[Array, " B"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Causal softmax attention over keys and values in a pool of blocks (arXiv 2309.06180, eq. 4).

    Position s of row b lies in slot `s % block` of the block `table[b, s // block]`. Blocks may lie
    anywhere in the pool, and rows may share them. Query t of row b has position `offsets[b] + t`
    and sees the keys up to its own, which must have been written before. For decoding (T = 1) and
    short chunks; made for inference: there is no gradient.

    What no query sees is never used: slots behind a row's length and blocks of nobody may hold NaN,
    and the table's entries for them any number. A query whose position is negative or not below its
    row's length is padding: it sees nothing.

    Args:
        q: queries; N is a multiple of K.
        k_pool: keys, same dtype as q.
        v_pool: values, likewise.
        table: blocks of each row, in order.
        lengths: how many keys of each row are written, those of its queries included.
        offsets: position of each row's first query; `lengths - T` when None: the row's last T.
        window: how many keys a query sees, itself included; all when None.
        scale: factor on the scores; 1/sqrt(H) when None.
        soft_cap: scores become `cap * tanh(scores / cap)` when given.
        implementation: see `genlab.kernels.dispatch`.

    Returns:
        The output, (B T N H) in q's dtype, zeros for a query that sees no key; and the log of the
        softmax denominator, (B T N) float32, -inf there. Lengths and the table are data and cannot
        be refused: both results are NaN in a row whose length is negative or above what its table
        holds, or that needs a block which the pool does not have.

    Raises:
        KernelArgumentError: shapes, dtypes or options that do not fit, or an implementation that
            cannot run them; also when the result is differentiated.
    """
    check_array(_OP, "q", q, "B T N H")
    batch, queries, heads, head_dim = q.shape
    check_array(_OP, "k_pool", k_pool, "pool block K H")
    pool, block, kv_heads = k_pool.shape[:3]
    check_array(_OP, "k_pool", k_pool, (pool, block, kv_heads, head_dim))
    check_array(_OP, "v_pool", v_pool, (pool, block, kv_heads, head_dim))
    for name, array in (("k_pool", k_pool), ("v_pool", v_pool)):
        if array.dtype != q.dtype:
            raise KernelArgumentError(
                f"{_OP}: {name} has dtype {array.dtype}; want {q.dtype}, that of q"
            )
    if 0 in (block, kv_heads, head_dim):
        raise KernelArgumentError(f"{_OP}: k_pool has shape {k_pool.shape}; want blocks of keys")
    if heads % kv_heads:
        raise KernelArgumentError(
            f"{_OP}: q has {heads} heads; want a multiple of the pool's {kv_heads}"
        )
    check_array(_OP, "table", table, "B blocks", "integer")
    check_array(_OP, "table", table, (batch, table.shape[1]), "integer")
    check_array(_OP, "lengths", lengths, (batch,), "integer")
    if offsets is not None:
        check_array(_OP, "offsets", offsets, (batch,), "integer")
    _check_numbers(window, scale, soft_cap)
    q, k_pool, v_pool = (jnp.asarray(x) for x in (q, k_pool, v_pool))
    table, lengths = (jnp.asarray(x).astype(jnp.int32) for x in (table, lengths))
    offsets = lengths - queries if offsets is None else jnp.asarray(offsets).astype(jnp.int32)
    plan, wrong = make_plan(
        table, lengths, offsets, queries=queries, window=window, pool=pool, block=block
    )
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    options = _Options(scale, None if soft_cap is None else float(soft_cap))
    arguments = (q, k_pool, v_pool, plan)
    preferred = PREFERRED[target_platform()]
    name = choose(_OP, IMPLEMENTATIONS, preferred, implementation, *arguments, **options._asdict())
    if 0 in (*q.shape, pool, table.shape[1]):
        out = jnp.zeros_like(q)
        log_total = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    else:
        out, log_total = _run(name, options, *arguments)
    wrong = wrong[:, None, None]
    return jnp.where(wrong[..., None], jnp.nan, out), jnp.where(wrong, jnp.nan, log_total)


def _check_numbers(window, scale, soft_cap) -> None:
    if window is not None and (type(window) is not int or window < 1):
        raise KernelArgumentError(
            f"{_OP}: window is {window!r}; want a whole number from 1 or None"
        )
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise KernelArgumentError(f"{_OP}: {name} is {value!r}; want a finite number or None")
    if soft_cap is not None and soft_cap <= 0:
        raise KernelArgumentError(f"{_OP}: soft_cap is {soft_cap!r}; want a number above 0 or None")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(name: str, options: _Options, q: Array, k_pool: Array, v_pool: Array, plan: Plan):
    return IMPLEMENTATIONS[name].run(q, k_pool, v_pool, plan, **options._asdict())


@_run.defjvp
def _no_gradient(name, options, primals, tangents):
    raise KernelArgumentError(
        f"{_OP}: no implementation has a gradient, it is made for inference; "
        "differentiate kernels.attention"
    )
