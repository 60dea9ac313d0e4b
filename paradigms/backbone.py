"""The backbone: a stack of layers described by a pattern, an embedding and a head."""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from ..errors import CapacityError, ConfigError
from ..kernels.cross_entropy import cross_entropy, weighted_cross_entropy
from .blocks.shared import FIRST
from .context import Context, LayerContext
from .interface import Cost, Out
from .layers.linear import product
from .layers.norm import make_norm
from .layers.params import Build, dropout, weight_bytes
from .masks import Causal
from .model_config import ModelConfig
from .ragged import Compacted, ModelState, compact, original_to_compacted, restore

MASKED = -1e30  # a logit that is never drawn; finite, so that entropies stay finite


class Backbone(nnx.Module):
    """Embedding, layers, final norm and head. Holds parameters; state is passed in and out."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Draws all parameters (float32)."""
        build = Build(
            config.width,
            config.num_layers,
            config.max_len,
            config.norm_eps,
            rngs,
            meta_tokens=config.meta_tokens,
            norm=config.norm,
        )
        self.config = config
        rows = config.padded_vocab_size
        self.embedding = build.normal((rows, config.embedding_width), 0.02)
        self.inputs = config.inputs.build(build)
        count = config.meta_tokens
        self.meta = build.normal((count, config.width), 0.02) if count else None
        for index, kind in enumerate(config.stack):
            if config.homes[index] != index:
                continue
            layer = config.layers[kind]
            parts = layer.parts(config.dropout)
            if hasattr(layer.block, "build_shared") and not hasattr(self, f"shared_{kind}"):
                setattr(self, f"shared_{kind}", layer.block.build_shared(build, parts))
            setattr(self, f"layer_{index}", layer.block.build(build, parts))
        self.final_norm = make_norm(build) if config.final_norm else None
        self.output = config.output.build(build, rows, config.embedding_width)
        self.w_head = None if config.tie_embeddings else build.matrix(config.head_width, rows)

    @property
    def blocks(self) -> list[Any]:
        """The layers in order."""
        blocks = []
        for home, kind in zip(self.config.homes, self.config.stack, strict=True):
            block = getattr(self, f"layer_{home}")
            shared = getattr(self, f"shared_{kind}", None)
            blocks.append(block if shared is None else block.using(shared))
        return blocks

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> ModelState:
        """A state without history for rows of up to `max_len` tokens."""
        states = tuple(b.init_state(batch, max_len, dtype=dtype) for b in self.blocks)
        # Three arrays, not one three times: a donated buffer may be given only once.
        length, segment, start = (jnp.zeros((batch,), jnp.int32) for _ in range(3))
        return ModelState(states, length, segment, start)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: ModelState | None = None,
        *,
        ctx: Context,
        collect: Collection[int] = (),
        remat: bool = False,
        begin: tuple | None = None,
    ) -> tuple[Out, ModelState | None]:
        """Runs the stack; see `genlab.paradigms.model.Model.__call__`."""
        compacted = self._enter(tokens, state, ctx, collect)
        begin = self.begin() if begin is None else begin
        layer_ctx = self._first_context(compacted)
        x = self._embed(compacted.tokens, layer_ctx)
        layer_ctx.shared[FIRST] = x
        aux: dict[str, Array] = {}
        stats: dict[str, Array] = {}
        taps: dict[int, Array] = {}
        states = []
        for index, block in enumerate(self.blocks):
            own = self._layer_context(layer_ctx, index, begin)
            layer_state = None if state is None else state.layers[index]
            call = partial(_call, block)
            call = jax.checkpoint(call) if remat else call
            x, layer_state, layer_aux, shared = call(x, layer_state, own)
            layer_ctx = layer_ctx.replace(shared=shared)
            states.append(layer_state)
            for name, value in layer_aux.items():
                if name.endswith("_loss"):
                    aux[name] = aux.get(name, jnp.zeros((), jnp.float32)) + value
                else:
                    stats[f"layer_{index}.{name}"] = value
            if index in collect:
                taps[index] = restore(x, compacted)
        hidden = restore(self._leave(x), compacted)
        new_state = None
        if state is not None:
            length = state.length + layer_ctx.lengths
            new_state = ModelState(
                tuple(states), length, compacted.segment, compacted.segment_start
            )
        return Out(hidden, aux, taps, stats), new_state

    def begin(self) -> tuple | None:
        """What documents begin with in each layer: the meta tokens, run through the stack."""
        if self.meta is None:
            return None
        x = self.meta[...][None]
        order = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        ctx = LayerContext(
            order=order,
            positions=order,
            segment_ids=jnp.zeros_like(order),
            starts_document=order == 0,
            lengths=jnp.full((1,), x.shape[1], jnp.int32),
            start=jnp.zeros((1,), jnp.int32),
            bounds=Causal().bounds(order),
            parents=None,
            shared={FIRST: x},
            dropout_key=None,
            mask_is_causal=True,
            history=False,
        )
        begins = []
        for block in self.blocks:
            x, begin = block.absorb(x, ctx)
            begins.append(begin)
        return tuple(begins)

    def verify(
        self,
        tokens: Int[Array, "B T"],
        state: ModelState,
        *,
        ctx: Context,
        begin: tuple | None = None,
    ) -> tuple[Out, tuple]:
        """Looks at tokens and promises nothing; see `Model.verify`."""
        compacted = self._enter(tokens, state, ctx, ())
        begin = self.begin() if begin is None else begin
        layer_ctx = self._first_context(compacted)
        x = self._embed(compacted.tokens, layer_ctx)
        layer_ctx.shared[FIRST] = x
        pending = []
        for index, block in enumerate(self.blocks):
            own = self._layer_context(layer_ctx, index, begin)
            x, layer_pending = block.verify(x, state.layers[index], own)
            pending.append(layer_pending)
        hidden = restore(self._leave(x), compacted)
        starts = layer_ctx.order - layer_ctx.positions
        held = (tuple(pending), compacted.source, layer_ctx.segment_ids, starts)
        return Out(hidden, {}, {}), held

    def commit(
        self,
        state: ModelState,
        pending: tuple,
        path: Int[Array, "B K"],
        accepted: Int[Array, " B"],
    ) -> ModelState:
        """Keeps verified tokens; see `Model.commit`."""
        layers, source, segment_ids, segment_start = pending
        path = original_to_compacted(path, source)
        states = tuple(
            block.commit(layer_state, layer_pending, path, accepted)
            for block, layer_state, layer_pending in zip(
                self.blocks, state.layers, layers, strict=True
            )
        )
        last = jnp.take_along_axis(path, jnp.maximum(accepted - 1, 0)[:, None], axis=1)

        def at_last(values: Array, old: Array) -> Array:
            return jnp.where(accepted > 0, jnp.take_along_axis(values, last, axis=1)[:, 0], old)

        return ModelState(
            states,
            state.length + accepted,
            at_last(segment_ids, state.segment),
            at_last(segment_start, state.segment_start),
        )

    def head(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits, float32; ids beyond `vocab_size` get no probability."""
        weight, vocab_first = self._head_weight(hidden.dtype)
        if self.output is not None:
            hidden = self.output.transform(hidden)
        spec = "rd,vd->rv" if vocab_first else "rd,dv->rv"
        logits = product(hidden, weight, spec, jnp.float32)
        if self.output is not None:
            logits = self.output.biased(logits)
        allowed = self._allowed(None)
        return logits if allowed is None else jnp.where(allowed, logits, MASKED)

    def nll(
        self, hidden: Float[Array, "*B D"], targets: Int[Array, "*B"], banned: int | None
    ) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """Cross-entropy of each target; see `Model.nll`."""
        weight, vocab_first = self._head_weight(hidden.dtype)
        if self.output is not None:
            hidden, weight = self.output.with_bias_inside(hidden, weight, vocab_first)
        nll, log_total = cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            targets.reshape(-1),
            allowed=self._allowed(banned),
            vocab_first=vocab_first,
        )
        return nll.reshape(targets.shape), log_total.reshape(targets.shape)

    def weighted_nll(
        self,
        hidden: Float[Array, "*B D"],
        targets: Int[Array, "*B"],
        token_weight: Float[Array, "*B"],
        banned: int | None,
    ) -> Float[Array, ""]:
        """A weighted sum of cross-entropies; see `Model.weighted_nll`."""
        weight, vocab_first = self._head_weight(hidden.dtype)
        if self.output is not None:
            hidden, weight = self.output.with_bias_inside(hidden, weight, vocab_first)
        return weighted_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            targets.reshape(-1),
            token_weight.reshape(-1),
            allowed=self._allowed(banned),
            vocab_first=vocab_first,
        )

    def _head_weight(self, dtype: Any) -> tuple[Array, bool]:
        """The head's matrix, and whether its first axis is the vocabulary."""
        if self.w_head is None:
            return self.embedding[...].astype(dtype), True
        return self.w_head[...].astype(dtype), False

    def _allowed(self, banned: int | None) -> Bool[Array, " V"] | None:
        """False for ids that have no probability; None when all have."""
        rows, vocab_size = self.config.padded_vocab_size, self.config.vocab_size
        if banned is None and rows == vocab_size:
            return None
        ids = jnp.arange(rows)
        return (ids < vocab_size) & (ids != (-1 if banned is None else banned))

    def cost_parts(
        self, batch: int, new_tokens: int, context: int, bytes_per_value: int, logits: int
    ) -> dict[str, Cost]:
        """Cost by part (see `Block.cost_parts`), "head" for the head on `logits` tokens a row."""
        config, rows = self.config, self.config.padded_vocab_size
        counters = 3 * 4 * batch  # length, document and its start per row
        # The head is read whole; of the embedding only the rows of the tokens.
        read = config.head_width * rows * bool(logits) * bytes_per_value
        read += batch * new_tokens * config.embedding_width * bytes_per_value
        head = float(2 * batch * logits * config.head_width * rows)
        ends = [end for end in (self.inputs, self.output, self.final_norm) if end is not None]
        read += sum(weight_bytes(end, bytes_per_value) for end in ends)
        if self.inputs is not None:
            read -= self.inputs.unread_bytes(batch * new_tokens, bytes_per_value)
            head += batch * new_tokens * self.inputs.flops_per_token
        if self.output is not None:
            head += batch * logits * self.output.flops_per_token
        parts = {"head": Cost(head, 0.0, float(counters), 0.0, float(read))}
        for block in self.blocks:
            own = block.cost_parts(batch, new_tokens, context, bytes_per_value)
            for name, cost in own.items():
                parts[name] = parts[name] + cost if name in parts else cost
        return parts

    def inactive_params(self) -> int:
        """Parameters that one token does not use."""
        homes, blocks = self.config.homes, self.blocks
        return sum(blocks[home].inactive_params() for home in set(homes))

    def _enter(
        self,
        tokens: Int[Array, "B T"],
        state: ModelState | None,
        ctx: Context,
        collect: Collection[int],
    ) -> Compacted:
        for index in collect:
            if not 0 <= index < self.config.num_layers:
                raise ValueError(f"collect: no layer {index}, there are {self.config.num_layers}")
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: want integers (B T), got {tokens.dtype} {tokens.shape}")
        if tokens.shape[1] > self.config.max_len and state is None:
            raise CapacityError(
                f"a row of {tokens.shape[1]} tokens is longer than max_len={self.config.max_len}"
            )
        compacted = compact(tokens, state, ctx)
        for index, block in enumerate(self.blocks):
            reason = block.supports(compacted.layer_ctx, stateful=state is not None)
            if reason is not None:
                raise ConfigError(f"model.layer_{index}: {reason}")
        return compacted

    def _embed(self, tokens: Int[Array, "B T"], ctx: LayerContext) -> Float[Array, "B T D"]:
        x = self.embedding[...][tokens]
        if self.inputs is not None:
            x = self.inputs(x, ctx.positions)
        if ctx.dropout_key is None:
            return x
        key = jax.random.fold_in(ctx.dropout_key, self.config.num_layers)
        return dropout(x, self.config.dropout, key)

    def _leave(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x if self.final_norm is None else self.final_norm(x)

    def _first_context(self, compacted: Compacted) -> LayerContext:
        return compacted.layer_ctx.replace(shared={})

    def _layer_context(
        self, ctx: LayerContext, index: int, begin: tuple | None
    ) -> LayerContext:
        if begin is not None:
            ctx = ctx.replace(begin=begin[index])
        if ctx.dropout_key is None:
            return ctx
        return ctx.replace(dropout_key=jax.random.fold_in(ctx.dropout_key, index))


def _call(
    block: Any, x: Array, state: Any, ctx: LayerContext
) -> tuple[Array, Any, dict[str, Array], dict[str, Any]]:
    """A layer's call as a function of arrays: what it hands on is returned, not left behind."""
    ctx = ctx.replace(shared=dict(ctx.shared))
    x, state, aux = block(x, state, ctx)
    return x, state, aux, ctx.shared
