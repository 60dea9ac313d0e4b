"""Attention mixer: grouped queries, rotary positions, optional window and query/key norm."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int
from pydantic import Field, model_validator

from ...kernels.attention import AttentionMask, attention, merge_attention
from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.norm import RMSNorm
from ..layers.params import Build, shape_of
from ..layers.rotary import rotary_phases, rotate


class AttentionConfig(Config):
    """Attention as a layer's mixer.

    Attributes:
        num_heads: N.
        num_kv_heads: K, divides N; null means N (multi-head attention).
        head_dim: H; null means D / N.
        window: a token sees this many tokens, itself included; null means all.
        rope_base: base of the rotary phases; null means no positional encoding.
        qk_norm: RMS-normalise queries and keys per head before the rotation.
        soft_cap: cap on the scores, null for none.
    """

    name: Literal["attention"] = "attention"
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    window: int | None = Field(default=None, ge=1)
    rope_base: float | None = Field(default=10000.0, gt=1.0)
    qk_norm: bool = False
    soft_cap: float | None = Field(default=None, gt=0.0)

    @model_validator(mode="after")
    def _heads_fit(self) -> "AttentionConfig":
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        return self

    def build(self, build: Build) -> "Attention":
        """Makes the mixer."""
        return Attention(self, build)


class AttentionState(NamedTuple):
    """Keys and values of the past; a ring of the window's size when there is a window.

    Attributes:
        k, v: (B S K H).
        order: int32 (B S), the order of the token in each slot; -1 where nothing was written.
        segment: int32 (B S), its document.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    order: Int[Array, "B S"]
    segment: Int[Array, "B S"]


class AttentionPending(NamedTuple):
    """Keys and values of verified tokens, with the order at which the first would be written."""

    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    segment: Int[Array, "B T"]
    start: Int[Array, " B"]


class Attention(nnx.Module):
    """Softmax attention (Vaswani et al. 2017) with grouped queries (arXiv 2305.13245)."""

    def __init__(self, config: AttentionConfig, build: Build):
        """Draws the four projections."""
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        if config.head_dim is None and build.width % config.num_heads:
            raise ValueError(
                f"width={build.width} is no multiple of num_heads={config.num_heads}: set head_dim"
            )
        self.head_dim = config.head_dim or build.width // config.num_heads
        if config.rope_base is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        self.window = config.window
        self.rope_base = config.rope_base
        self.soft_cap = config.soft_cap
        width, inner = build.width, self.num_heads * self.head_dim
        kv_inner = self.num_kv_heads * self.head_dim
        self.w_q = build.matrix(width, inner)
        self.w_k = build.matrix(width, kv_inner)
        self.w_v = build.matrix(width, kv_inner)
        self.w_o = build.matrix(inner, width, residual=True)
        self.q_norm = RMSNorm(self.head_dim, build.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, build.norm_eps) if config.qk_norm else None

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> AttentionState:
        """An empty state of min(max_len, window) slots, zeros in `dtype`."""
        slots = max_len if self.window is None else min(max_len, self.window)
        shape = (batch, slots, self.num_kv_heads, self.head_dim)
        return AttentionState(
            k=jnp.zeros(shape, dtype),
            v=jnp.zeros(shape, dtype),
            order=jnp.full((batch, slots), -1, jnp.int32),
            segment=jnp.full((batch, slots), -1, jnp.int32),
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: AttentionState | None, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], AttentionState | None]:
        """Attends to the state and to the new tokens, then writes the new tokens."""
        y, k, v = self._attend(x, state, ctx)
        if state is None:
            return y, None
        keep = ctx.segment_ids >= 0
        return y, self._write(state, k, v, ctx.order, ctx.segment_ids, keep, ctx.lengths)

    def verify(
        self, x: Float[Array, "B T D"], state: AttentionState, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], AttentionPending]:
        """Attends like a call; nothing is written."""
        y, k, v = self._attend(x, state, ctx)
        return y, AttentionPending(k, v, ctx.segment_ids, ctx.start)

    def commit(
        self,
        state: AttentionState,
        pending: AttentionPending,
        path: Int[Array, "B K"],
        accepted: Int[Array, " B"],
    ) -> AttentionState:
        """Writes keys and values of the first `accepted` tokens along `path`."""
        depth = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
        at = path[:, :, None, None]
        return self._write(
            state,
            jnp.take_along_axis(pending.k, at, axis=1),
            jnp.take_along_axis(pending.v, at, axis=1),
            pending.start[:, None] + depth,
            jnp.take_along_axis(pending.segment, path, axis=1),
            depth < accepted[:, None],
            accepted,
        )

    def cost(self, batch: int, new_tokens: int, context: int, bytes_per_value: int) -> Cost:
        """Projections, and scores and sums over the visible keys under a causal mask."""
        width = shape_of(self.w_q)[0]
        inner, kv_inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = 2 * new_tokens * width * (2 * inner + 2 * kv_inner)
        seen = sum(
            min(context + t + 1, self.window or context + t + 1) for t in range(new_tokens)
        )
        scores = 2 * 2 * seen * inner
        token_bytes = 2 * kv_inner * bytes_per_value + 2 * 4  # and its order and document
        held = context if self.window is None else min(context, self.window)
        ring = 0 if self.window is None else self.window * token_bytes
        return Cost(
            flops=float(batch * (projections + scores)),
            bytes_read=float(batch * held * token_bytes),
            state_bytes_fixed=float(batch * ring),
            state_bytes_per_token=float(0 if self.window else batch * token_bytes),
        )

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """Attention honours every mask, with and without state."""
        del ctx, stateful
        return None

    def _attend(
        self, x: Float[Array, "B T D"], state: AttentionState | None, ctx: LayerContext
    ) -> tuple[Array, Array, Array]:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = (x @ self.w_q[...].astype(x.dtype)).reshape(heads)
        k = (x @ self.w_k[...].astype(x.dtype)).reshape(heads)
        v = (x @ self.w_v[...].astype(x.dtype)).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            phases = rotary_phases(ctx.positions, self.head_dim, self.rope_base)
            q, k = rotate(q, phases), rotate(k, phases)
        mask = self._mask(ctx)
        out, log_total = attention(q, k, v, mask, soft_cap=self.soft_cap)
        if state is not None and ctx.history:
            past = mask._replace(
                k_order=state.order, k_segment=state.segment, k_tag=None, q_tag=None, tree=None
            )
            past_out, past_log_total = attention(
                q,
                state.k.astype(q.dtype),
                state.v.astype(q.dtype),
                past,
                soft_cap=self.soft_cap,
            )
            out = merge_attention(out, log_total, past_out, past_log_total)
        y = out.reshape(batch, length, -1) @ self.w_o[...].astype(x.dtype)
        return y, k, v

    def _mask(self, ctx: LayerContext) -> AttentionMask:
        q_lo, q_hi = ctx.bounds.q_lo, ctx.bounds.q_hi
        if self.window is not None:
            q_lo = jnp.maximum(q_lo, ctx.order - (self.window - 1))
            q_hi = jnp.minimum(q_hi, ctx.order + (self.window - 1))
        return AttentionMask(
            q_lo=q_lo,
            q_hi=q_hi,
            k_order=jnp.where(ctx.segment_ids >= 0, ctx.order, -1),
            q_segment=ctx.segment_ids,
            k_segment=ctx.segment_ids,
            q_tag=ctx.bounds.q_tag,
            k_tag=ctx.bounds.k_tag,
            tree=None if ctx.parents is None else ctx.ancestors(),
        )

    def _write(
        self,
        state: AttentionState,
        k: Array,
        v: Array,
        order: Array,
        segment: Array,
        keep: Array,
        lengths: Array,
    ) -> AttentionState:
        slots = state.order.shape[1]
        slot = order
        if self.window is not None:
            # Of more new tokens than the ring has slots only the last ones stay.
            end = order[:, :1] + lengths[:, None]
            keep = keep & (order >= end - slots)
            slot = order % slots
        slot = jnp.where(keep, slot, slots)
        rows = jnp.arange(order.shape[0])[:, None]

        def put(past: Array, new: Array) -> Array:
            return past.at[rows, slot].set(new.astype(past.dtype), mode="drop")

        return AttentionState(
            put(state.k, k), put(state.v, v), put(state.order, order), put(state.segment, segment)
        )
