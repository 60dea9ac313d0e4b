"""Attention mixer: grouped queries, rotary positions, optional window and query/key norm."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
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
from ..layers.params import Build, adapted, plus, shape_of
from ..layers.rotary import RopeScaling, rotary_phases, rotate


class AttentionConfig(Config):
    """Attention as a layer's mixer.

    Attributes:
        num_heads: N.
        num_kv_heads: K, divides N; null means N (multi-head attention).
        head_dim: H; null means D / N.
        window: a token sees this many tokens, itself included; null means all.
        rope_base: base of the rotary phases; null means no positional encoding.
        rope_scaling: how the phases are stretched to longer texts; null for not at all.
        rotary_dim: only so many channels of a head are rotated; null means all.
        qkv_bias: add a learnt bias to queries, keys and values.
        out_bias: add a learnt bias to the output.
        qk_norm: RMS-normalise queries and keys per head before the rotation.
        soft_cap: cap on the scores, null for none.
        score_scale: factor on the scores; null means 1/sqrt(H).
        kv: `own` keys and values; `publish` hands them to later layers too; `reuse` attends to
            those that the last publishing layer below holds, and keeps none (Hymba, arXiv
            2411.13676, sec. 2.3).
    """

    name: Literal["attention"] = "attention"
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    window: int | None = Field(default=None, ge=1)
    rope_base: float | None = Field(default=10000.0, gt=1.0)
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = Field(default=None, ge=2, multiple_of=2)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    soft_cap: float | None = Field(default=None, gt=0.0)
    score_scale: float | None = Field(default=None, gt=0.0)
    kv: Literal["own", "publish", "reuse"] = "own"

    @model_validator(mode="after")
    def _heads_fit(self) -> "AttentionConfig":
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        for field in ("rope_scaling", "rotary_dim"):
            if self.rope_base is None and getattr(self, field) is not None:
                raise ValueError(f"{field} is of rotary positions, which rope_base=null leaves out")
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


class KeysValues(NamedTuple):
    """Keys and values of a call's new tokens or of the meta tokens, after the rotation."""

    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


class Published(NamedTuple):
    """What a layer hands to those that reuse its keys and values.

    Attributes:
        new: of the call's tokens.
        past: its state before the call; None without state.
        begin: of the meta tokens; None without.
    """

    new: KeysValues
    past: AttentionState | None
    begin: KeysValues | None


PUBLISHED = "keys_values"  # where `LayerContext.shared` holds it


def check_reuse(mixers: Iterable[Any]) -> str | None:
    """The reason why a stack's mixers cannot share keys and values as they ask, None if they can.

    Args:
        mixers: all mixers' configurations in the order in which they run.
    """
    published: AttentionConfig | None = None
    same = (
        "num_heads", "num_kv_heads", "head_dim", "window", "rope_base", "rope_scaling",
        "rotary_dim", "qk_norm",
    )  # fmt: skip
    for config in mixers:
        if not isinstance(config, AttentionConfig):
            continue
        if config.kv == "publish":
            published = config
        elif config.kv == "reuse":
            if published is None:
                return "kv=reuse needs a layer with kv=publish before it"
            for field in same:
                theirs, own = getattr(published, field), getattr(config, field)
                if theirs != own:
                    return f"kv=reuse has {field}={own}, the publishing layer has {theirs}"
    return None


class Attention(nnx.Module):
    """Softmax attention (Vaswani et al. 2017) with grouped queries (arXiv 2305.13245)."""

    adaptable = ("w_q", "w_k", "w_v", "w_o")

    def __init__(self, config: AttentionConfig, build: Build):
        """Draws the four projections (two where keys and values are reused)."""
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        width = build.read_width
        if config.head_dim is None and width % config.num_heads:
            raise ValueError(
                f"width={width} is no multiple of num_heads={config.num_heads}: set head_dim"
            )
        self.head_dim = config.head_dim or width // config.num_heads
        if config.rope_base is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        self.rotary_dim = config.rotary_dim or self.head_dim
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} exceeds head_dim={self.head_dim}")
        self.window = config.window
        self.rope_base, self.rope_scaling = config.rope_base, config.rope_scaling
        self.soft_cap = config.soft_cap
        self.score_scale = config.score_scale
        self.kv = config.kv
        self.meta_tokens = build.meta_tokens
        inner = self.num_heads * self.head_dim
        kv_inner = self.num_kv_heads * self.head_dim
        self.w_q = build.matrix(width, inner)
        own = self.kv != "reuse"
        self.w_k = build.matrix(width, kv_inner) if own else None
        self.w_v = build.matrix(width, kv_inner) if own else None
        self.w_o = build.matrix(inner, build.width, residual=True)
        biased = config.qkv_bias
        self.b_q = build.zeros(inner) if biased else None
        self.b_k = build.zeros(kv_inner) if biased and own else None
        self.b_v = build.zeros(kv_inner) if biased and own else None
        self.b_o = build.zeros(build.width) if config.out_bias else None
        normed = config.qk_norm
        self.q_norm = RMSNorm(self.head_dim, build.norm_eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, build.norm_eps) if normed and own else None

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> Any:
        """An empty state of min(max_len, window) slots, zeros in `dtype`; none when reusing."""
        if self.kv == "reuse":
            return ()
        slots = max_len if self.window is None else min(max_len, self.window)
        shape = (batch, slots, self.num_kv_heads, self.head_dim)
        return AttentionState(
            k=jnp.zeros(shape, dtype),
            v=jnp.zeros(shape, dtype),
            order=jnp.full((batch, slots), -1, jnp.int32),
            segment=jnp.full((batch, slots), -1, jnp.int32),
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: Any, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Attends to the state and to the new tokens, then writes the new tokens."""
        y, new = self._attend(x, state, ctx)
        if state is None or self.kv == "reuse":
            return y, state
        # Unordered, XLA copies the whole state (twice, on CPUs) to read it while it is written.
        # JAX 0.10.2 does so all the same.
        y, state = jax.lax.optimization_barrier((y, state))
        keep = ctx.segment_ids >= 0
        return y, self._write(state, *new, ctx.order, ctx.segment_ids, keep, ctx.lengths)

    def verify(
        self, x: Float[Array, "B T D"], state: Any, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Attends like a call; nothing is written."""
        y, new = self._attend(x, state, ctx)
        if self.kv == "reuse":
            return y, ()
        return y, AttentionPending(*new, ctx.segment_ids, ctx.start)

    def absorb(
        self, x: Float[Array, "1 M D"], ctx: LayerContext
    ) -> tuple[Float[Array, "1 M D"], KeysValues | None]:
        """Attends among meta tokens; returns their keys and values, which documents begin with."""
        y, new = self._attend(x, None, ctx, absorbing=True)
        return y, None if self.kv == "reuse" else new

    def commit(
        self,
        state: Any,
        pending: Any,
        path: Int[Array, "B K"],
        accepted: Int[Array, " B"],
    ) -> Any:
        """Writes keys and values of the first `accepted` tokens along `path`."""
        if self.kv == "reuse":
            return state
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
        width, columns = shape_of(self.w_q)[0], shape_of(self.w_o)[1]
        inner, kv_inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own = self.kv != "reuse"
        matrices = width * inner + inner * columns + (2 * width * kv_inner if own else 0)
        projections = 2 * new_tokens * matrices
        seen = self.meta_tokens * new_tokens + sum(
            min(context + t + 1, self.window or context + t + 1) for t in range(new_tokens)
        )
        scores = 2 * 2 * seen * inner
        meta_bytes = 2 * kv_inner * bytes_per_value * self.meta_tokens
        token_bytes = 2 * kv_inner * bytes_per_value + 2 * 4  # and its order and document
        held = context if self.window is None else min(context, self.window)
        ring = 0 if self.window is None else self.window * token_bytes
        return Cost(
            flops=float(batch * (projections + scores)),
            bytes_read=float(batch * held * token_bytes + meta_bytes),
            state_bytes_fixed=float(batch * ring) if own else 0.0,
            state_bytes_per_token=float(0 if self.window or not own else batch * token_bytes),
            mixing_flops=float(batch * scores),
            bytes_written=float(batch * new_tokens * token_bytes) if own else 0.0,
            state_windows=((self.window, float(batch * token_bytes)),) if ring and own else (),
        )

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """Attention honours every mask, with and without state."""
        del ctx, stateful
        return None

    def _attend(
        self,
        x: Float[Array, "B T D"],
        state: AttentionState | None,
        ctx: LayerContext,
        *,
        absorbing: bool = False,
    ) -> tuple[Array, KeysValues]:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        phases = None
        if self.rope_base is not None:
            # Meta tokens take the first positions of every document.
            positions = ctx.positions + (0 if absorbing else self.meta_tokens)
            phases = rotary_phases(
                positions, self.rotary_dim, self.rope_base, self.rope_scaling, ctx.lengths
            )
        q = plus(adapted(x, self.w_q, ctx, "w_q"), self.b_q).reshape(heads)
        q = q if self.q_norm is None else self.q_norm(q)
        q = q if phases is None else rotate(q, phases)
        if self.kv == "reuse":
            new, state, begin = ctx.shared[PUBLISHED]
        else:
            k = plus(adapted(x, self.w_k, ctx, "w_k"), self.b_k).reshape(heads)
            k = k if self.k_norm is None else self.k_norm(k)
            k = k if phases is None else rotate(k, phases)
            v = plus(adapted(x, self.w_v, ctx, "w_v"), self.b_v).reshape(heads)
            new = KeysValues(k, v)
            begin = ctx.begin
        if self.kv == "publish":
            ctx.shared[PUBLISHED] = Published(new, state, begin)
        mask = self._mask(ctx, windowed=not absorbing)
        options = {"scale": self.score_scale, "soft_cap": self.soft_cap}
        keys, key_mask = (new, mask) if begin is None else _with_meta(new, begin, mask)
        out, log_total = attention(q, *keys, key_mask, **options)
        if state is not None and ctx.history:
            past = mask._replace(
                k_order=state.order, k_segment=state.segment, k_tag=None, q_tag=None, tree=None
            )
            held = state.k.astype(q.dtype), state.v.astype(q.dtype)
            past_out, past_log_total = attention(q, *held, past, **options)
            out = merge_attention(out, log_total, past_out, past_log_total)
        y = adapted(out.reshape(batch, length, -1), self.w_o, ctx, "w_o")
        return plus(y, self.b_o), new

    def _mask(self, ctx: LayerContext, *, windowed: bool) -> AttentionMask:
        q_lo, q_hi = ctx.bounds.q_lo, ctx.bounds.q_hi
        if self.window is not None and windowed:
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


def _with_meta(
    new: KeysValues, begin: KeysValues, mask: AttentionMask
) -> tuple[KeysValues, AttentionMask]:
    """The new keys and values behind the meta tokens', which every document sees."""
    batch, count = new.k.shape[0], begin.k.shape[1]

    def join(meta: Array, own: Array) -> Array:
        meta = jnp.broadcast_to(meta.astype(own.dtype), (batch, *meta.shape[1:]))
        return jnp.concatenate([meta, own], axis=1)

    def fill(values: Array | None, with_: Any) -> Array | None:
        if values is None:
            return None
        front = jnp.full((*values.shape[:-1], count), with_, values.dtype)
        return jnp.concatenate([front, values], axis=-1)

    pinned = jnp.arange(count + new.k.shape[1]) < count
    joined = mask._replace(
        k_order=fill(mask.k_order, -1),
        k_segment=fill(mask.k_segment, -1),
        k_tag=fill(mask.k_tag, -1),
        k_pinned=jnp.broadcast_to(pinned, (batch, pinned.size)),
        tree=fill(mask.tree, False),
    )
    return KeysValues(join(begin.k, new.k), join(begin.v, new.v)), joined
