"""What a request at a long context takes in memory, by the compiler's own account."""

from typing import Any

import jax
import jax.numpy as jnp

from ...paradigms.context import Context
from ...paradigms.masks import Full
from ...paradigms.model import Model
from .growth import array_bytes
from .records import Memory


def measure_memory(model: Model, context: int, *, keeps_state: bool) -> Memory:
    """Compiles one model call at `context` tokens, without running it or holding its arrays.

    With a state the call is a decode step: one new token behind a state of that length. Without
    one it is a call on the whole canvas, as a denoising step makes.

    Args:
        model: ready to compute.
        context: tokens of the row.
        keeps_state: the decoding keeps the model's memory of the row.
    """
    longer = model.with_max_len(max(context, model.config.max_len))
    weights = jax.eval_shape(lambda m: m, longer)
    state: Any = None
    if keeps_state:
        state = jax.eval_shape(lambda m: m.init_state(1, context), longer)

        def call(model: Model, tokens: jax.Array, state: Any) -> Any:
            out, state = model(tokens, state)
            return model.head(out.hidden), state

        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        compiled = jax.jit(call, donate_argnums=2).lower(weights, tokens, state).compile()
    else:

        def call_canvas(model: Model, tokens: jax.Array) -> Any:
            return model.head(model(tokens, ctx=Context(mask=Full()))[0].hidden)

        tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)
        compiled = jax.jit(call_canvas).lower(weights, tokens).compile()
    analysis = compiled.memory_analysis()
    working = None
    if analysis is not None:
        working = int(
            analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
        )
    return Memory(
        context=context,
        weight_bytes=array_bytes(model.params),
        state_bytes=array_bytes(state),
        working_bytes=working,
        call="one new token" if keeps_state else "the whole canvas",
    )
