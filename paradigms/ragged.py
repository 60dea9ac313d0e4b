"""Rows of unequal length: bring every row's valid tokens to the front, and put results back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from .context import Context, LayerContext


class ModelState(NamedTuple):
    """A model's memory. Opaque: nobody outside a mixer reads the layers' fields.

    Attributes:
        layers: one state per layer.
        length: int32 (B), tokens taken in so far.
        segment: int32 (B), document of the last token; 0 before the first.
        segment_start: int32 (B), order at which that document began.
    """

    layers: tuple
    length: Int[Array, " B"]
    segment: Int[Array, " B"]
    segment_start: Int[Array, " B"]


class Compacted(NamedTuple):
    """Tokens in valid-first order and the way back.

    Attributes:
        tokens: int32 (B T).
        layer_ctx: the mixers' context.
        source: int32 (B T), where each compacted token came from; None if nothing moved.
        segment: int32 (B), document of the last valid token.
        segment_start: int32 (B), order at which it began.
    """

    tokens: Int[Array, "B T"]
    layer_ctx: LayerContext
    source: Int[Array, "B T"] | None
    segment: Int[Array, " B"]
    segment_start: Int[Array, " B"]


def compact(tokens: Int[Array, "B T"], state: ModelState | None, ctx: Context) -> Compacted:
    """Sorts out padding, documents and positions of one call.

    Args:
        tokens: int32 (B T).
        state: the history, or None.
        ctx: the caller's context.

    Raises:
        ValueError: both `valid` and `lengths` were given, or an array has another shape.
    """
    batch, length = tokens.shape
    _check(ctx, tokens.shape)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    start = jnp.zeros((batch,), jnp.int32) if state is None else state.length
    valid = ctx.valid
    if ctx.segment_ids is not None:
        real = ctx.segment_ids >= 0
        valid = real if valid is None else valid & real
    mask, parents, source = ctx.mask, ctx.parents, None
    segment_ids = ctx.segment_ids
    if valid is None:
        lengths = jnp.full((batch,), length, jnp.int32) if ctx.lengths is None else ctx.lengths
    else:
        source = jnp.argsort(~valid, axis=1, stable=True).astype(jnp.int32)
        tokens = jnp.take_along_axis(tokens, source, axis=1)
        mask = mask.rearranged(source)
        if segment_ids is not None:
            segment_ids = jnp.take_along_axis(segment_ids, source, axis=1)
        if parents is not None:
            target = jnp.argsort(source, axis=1).astype(jnp.int32)
            moved = jnp.take_along_axis(parents, source, axis=1)
            new_parent = jnp.take_along_axis(target, jnp.maximum(moved, 0), axis=1)
            parents = jnp.where(moved >= 0, new_parent, -1)
        lengths = jnp.sum(valid, axis=1, dtype=jnp.int32)
    inside = index < lengths[:, None]
    if segment_ids is None:
        current = jnp.zeros((batch,), jnp.int32) if state is None else state.segment
        segment_ids = jnp.broadcast_to(current[:, None], (batch, length))
    segment_ids = jnp.where(inside, segment_ids.astype(jnp.int32), -1)
    depth = jnp.broadcast_to(index, (batch, length))
    if parents is not None:
        depth = _depths(parents)
    order = start[:, None] + depth
    before = jnp.full((batch,), -1, jnp.int32)
    first_start = jnp.zeros((batch,), jnp.int32)
    if state is not None:
        before = jnp.where(start > 0, state.segment, -1)
        first_start = state.segment_start
    previous = jnp.concatenate([before[:, None], segment_ids[:, :-1]], axis=1)
    starts_document = inside & (segment_ids != previous)
    if parents is not None:
        # A draft continues the state's document: only an empty history begins one.
        starts_document = inside & (order == 0)
    begun = jnp.where(starts_document, order, first_start[:, None])
    segment_start = jnp.maximum(_running_max(begun), first_start[:, None])
    layer_ctx = LayerContext(
        order=order,
        positions=order - segment_start,
        segment_ids=segment_ids,
        starts_document=starts_document,
        lengths=lengths,
        start=start,
        bounds=mask.bounds(order),
        parents=parents,
        shared={},
        dropout_key=ctx.dropout_key,
        mask_is_causal=mask.is_causal,
        history=ctx.history and state is not None,
    )
    last = jnp.maximum(lengths - 1, 0)[:, None]
    had = lengths > 0
    old_segment = jnp.zeros((batch,), jnp.int32) if state is None else state.segment
    return Compacted(
        tokens,
        layer_ctx,
        source,
        jnp.where(had, jnp.take_along_axis(segment_ids, last, axis=1)[:, 0], old_segment),
        jnp.where(had, jnp.take_along_axis(segment_start, last, axis=1)[:, 0], first_start),
    )


def restore(x: Float[Array, "B T D"], compacted: Compacted) -> Float[Array, "B T D"]:
    """Puts compacted values back where the caller's tokens stand; zeros at padding."""
    inside = jnp.arange(x.shape[1])[None] < compacted.layer_ctx.lengths[:, None]
    x = jnp.where(inside[:, :, None], x, 0)
    if compacted.source is None:
        return x
    target = jnp.argsort(compacted.source, axis=1)
    return jnp.take_along_axis(x, target[:, :, None], axis=1)


def original_to_compacted(
    path: Int[Array, "B K"], source: Int[Array, "B T"] | None
) -> Int[Array, "B K"]:
    """Translates the caller's token indices into compacted ones."""
    if source is None:
        return path
    return jnp.take_along_axis(jnp.argsort(source, axis=1).astype(jnp.int32), path, axis=1)


def _running_max(x: Int[Array, "B T"]) -> Int[Array, "B T"]:
    # Rows are short and this runs once a call: log2(T) shifted maxima.
    step = 1
    while step < x.shape[1]:
        shifted = jnp.pad(x, ((0, 0), (step, 0)), constant_values=-1)[:, : x.shape[1]]
        x = jnp.maximum(x, shifted)
        step *= 2
    return x


def _depths(parents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    def body(t: Array, depth: Array) -> Array:
        parent = parents[:, t]
        above = jnp.take_along_axis(depth, jnp.maximum(parent, 0)[:, None], axis=1)[:, 0]
        return depth.at[:, t].set(jnp.where(parent >= 0, above + 1, 0))

    return jax.lax.fori_loop(0, parents.shape[1], body, jnp.zeros_like(parents))


def _check(ctx: Context, shape: tuple[int, int]) -> None:
    if ctx.valid is not None and ctx.lengths is not None:
        raise ValueError("context: give valid or lengths, not both")
    for name in ("valid", "segment_ids", "parents"):
        array = getattr(ctx, name)
        if array is not None and array.shape != shape:
            raise ValueError(f"context: {name} has shape {array.shape}, want {shape}")
    if ctx.valid is not None and ctx.valid.dtype != jnp.bool_:
        raise ValueError(f"context: valid has dtype {ctx.valid.dtype}, want bool")
    if ctx.lengths is not None and ctx.lengths.shape != shape[:1]:
        raise ValueError(f"context: lengths has shape {ctx.lengths.shape}, want {shape[:1]}")
