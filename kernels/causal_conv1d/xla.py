"""The causal convolution in plain JAX: W shifted multiply-adds, which XLA fuses into one pass.

There is no Pallas kernel, on any device: the op reads x once and writes y once as it is, bias and
activation included, and XLA can fuse what comes before and behind it too, which a kernel ends.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .reference import activate


def run(
    x: Float[Array, "B T E"],
    weight: Float[Array, "W E"],
    bias: Float[Array, " E"] | None,
    *,
    state: Float[Array, "B W-1 E"],
    reset: Bool[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
    activation: str | None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """Arguments and results as in `reference.run`."""
    length, width = x.shape[1], weight.shape[0]
    weight = weight.astype(jnp.float32)
    bias = jnp.zeros((x.shape[2],), jnp.float32) if bias is None else bias.astype(jnp.float32)
    inputs = jnp.concatenate([state.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    document = seen = None
    if reset is not None:
        # The number of resets up to each input; the carried ones are in document 0.
        document = jnp.pad(jnp.cumsum(reset, axis=1), ((0, 0), (width - 1, 0)))
        own = document[:, width - 1 :]
        seen = tuple(document[:, tap : tap + length] == own for tap in range(width - 1))
    y = _convolve(activation, x.dtype, inputs, weight, bias, seen)
    if document is not None:
        inputs = jnp.where((document == document[:, -1:])[:, :, None], inputs, 0.0)
    if valid is None:
        window = inputs[:, length:]
    else:
        # Inputs `n .. n + W - 2` of the concatenation are the last W - 1 of n valid steps.
        y = jnp.where(valid[:, :, None], y, 0)
        at = jnp.sum(valid, axis=1)[:, None] + jnp.arange(width - 1)
        window = jnp.take_along_axis(inputs, at[:, :, None], axis=1)
    return y, window.astype(state.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(
    activation: str | None,
    dtype: jnp.dtype,
    inputs: Float[Array, "B T+W-1 E"],
    weight: Float[Array, "W E"],
    bias: Float[Array, " E"],
    seen: tuple[Bool[Array, "B T"], ...] | None,
) -> Float[Array, "B T E"]:
    """The activated sum of taps, in `dtype`; `seen`: of each tap but the last, where it counts."""
    return activate(_sums(inputs, weight, bias, seen), activation).astype(dtype)


def _sums(inputs, weight, bias, seen):
    y = bias
    for tap in range(weight.shape[0]):
        y = y + weight[tap] * _tapped(inputs, tap, weight.shape[0], seen)
    return y


def _tapped(inputs, tap, width, seen):
    """What a tap meets at each step; 0 where that is of another document."""
    met = inputs[:, tap : tap + inputs.shape[1] - (width - 1)]
    if seen is None or tap == width - 1:
        return met
    return jnp.where(seen[tap][:, :, None], met, 0.0)


def _convolve_forward(activation, dtype, inputs, weight, bias, seen):
    saved = inputs, weight, bias, seen
    return _convolve(activation, dtype, *saved), saved


def _convolve_backward(activation, dtype, saved, dy):
    """The sums are made again, and their cotangent is the only array that is held.

    What XLA's own backward pass of the slices holds are padded copies of it for each tap.
    """
    inputs, weight, bias, seen = saved
    width, last = weight.shape[0], weight.shape[0] - 1
    dy = dy.astype(jnp.float32)
    _, pull = jax.vjp(functools.partial(activate, activation=activation),
                      _sums(inputs, weight, bias, seen))  # fmt: skip
    (dsums,) = pull(dy)
    # Zeros on both sides, so that every input finds the steps that it was in at one place.
    dsums = lax.optimization_barrier(jnp.pad(dsums, ((0, 0), (last, last), (0, 0))))
    own = dsums[:, last : dsums.shape[1] - last]
    dinputs, dweight = jnp.zeros((), jnp.float32), []
    for tap in range(width):
        at_input = dsums[:, last - tap : last - tap + inputs.shape[1]]
        if seen is not None and tap < last:
            counts = jnp.pad(seen[tap], ((0, 0), (tap, last - tap)))
            at_input = jnp.where(counts[:, :, None], at_input, 0.0)
        dinputs = dinputs + weight[tap] * at_input
        dweight.append(jnp.sum(own * _tapped(inputs, tap, width, seen), axis=(0, 1)))
    return dinputs, jnp.stack(dweight), jnp.sum(own, axis=(0, 1)), None


_convolve.defvjp(_convolve_forward, _convolve_backward)
