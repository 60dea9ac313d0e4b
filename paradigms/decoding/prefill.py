"""Taking prompts in: whole, or piece by piece where that is the same and faster."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ...kernels.compat import target_platform
from ..context import Context
from ..model import Model
from ..ragged import ModelState

# Most tokens of a row in one piece. On a CPU the channels of longer ones leave the caches; other
# devices are filled better by a whole prompt.
MOST = {"cpu": 1024}


def prefill(
    model: Model, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], max_len: int
) -> tuple[Float[Array, "B D"], ModelState]:
    """Takes in whole prompts of a batch without history.

    Args:
        model: any causal one.
        tokens: valid ones first.
        lengths: valid tokens per row, at least 1.
        max_len: room of the state.

    Returns:
        The hidden state of each row's last valid token, in the compute dtype, and the memory.
    """
    batch, length = tokens.shape
    memory = model.init_state(batch, max_len)
    pieces = -(-length // MOST.get(target_platform(), length))
    if pieces == 1 or not takes_pieces(model):
        out, memory = model(tokens, memory, ctx=Context(lengths=lengths, history=False))
        return _at(out.hidden, lengths - 1), memory
    size = -(-length // pieces)  # even pieces: the last is at most `pieces - 1` tokens shorter
    parts = jnp.pad(tokens, ((0, 0), (0, pieces * size - length)))
    parts = jnp.moveaxis(parts.reshape(batch, pieces, size), 1, 0)

    def take(carry, part):
        memory, last = carry
        begin, tokens = part
        here = jnp.clip(lengths - begin, 0, size)
        out, memory = model(tokens, memory, ctx=Context(lengths=here))
        found = _at(out.hidden, jnp.maximum(here - 1, 0))
        return (memory, jnp.where((here > 0)[:, None], found, last)), None

    last = jnp.zeros((batch, model.config.width), model.dtype)
    begins = jnp.arange(pieces, dtype=lengths.dtype) * size
    (memory, last), _ = jax.lax.scan(take, (memory, last), (begins, parts))
    return last, memory


def takes_pieces(model: Model) -> bool:
    """Whether a model's prompts are worth taking in pieces, which come to the same.

    A state that grows would be read whole by every piece, and scaled rotary phases depend on the
    longest position of a call.
    """
    mixers = [m for kind in model.config.stack for m in model.config.layers[kind].all_mixers]
    if any(getattr(mixer, "rope_scaling", None) is not None for mixer in mixers):
        return False
    return model.cost(1, 1, 0).state_bytes_per_token == 0


def _at(hidden: Float[Array, "B T D"], index: Int[Array, " B"]) -> Float[Array, "B D"]:
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
