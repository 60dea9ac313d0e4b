"""Small runs of the operations that mix time, for their speed on this machine.

One shape each, chosen once and never fitted to a model: what a model of another width, depth or
length takes then follows from its equations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...kernels.attention import AttentionMask, attention
from ...kernels.selective_scan import selective_scan
from ...kernels.ssd import ssd

LENGTH = 256  # new tokens of the many-token probe
CONTEXT = 512  # tokens of history of the one-token probe


class Probe(NamedTuple):
    """An operation on fixed arrays.

    Attributes:
        run: x -> x of the same shape; arrays that the operation reads beside are in `held`.
        x: what it is applied to.
        held: the other arrays.
        amount: FLOPs by the equation, or bytes of state, of one run.
        fixed: `held` stays as it is in a loop, as weights do; a state does not.
    """

    run: Callable[[Array, Any], Array]
    x: Array
    held: Any
    amount: float
    fixed: bool = False


class Probes(NamedTuple):
    """Of one kind of mixer: over many tokens; over one with a state, None where it has none."""

    many: Probe
    one: Probe | None


def attention_probes(dtype: Any) -> Probes:
    """Causal attention of 8 heads and 4 key/value heads of width 64."""
    heads, kv_heads, head_dim = 8, 4, 64

    def operands(queries: int, keys: int) -> tuple[Array, tuple]:
        order = jnp.arange(keys, dtype=jnp.int32)[None]
        zeros = jnp.zeros((1, keys), jnp.int32)
        mask = AttentionMask(
            q_lo=zeros[:, :queries],
            q_hi=order[:, keys - queries :],
            k_order=order,
            q_segment=zeros[:, :queries],
            k_segment=zeros,
        )
        k, v = (_normal(i, (1, keys, kv_heads, head_dim), dtype) for i in (1, 2))
        return _normal(0, (1, queries, heads, head_dim), dtype), (k, v, mask)

    def run(q: Array, held: Any) -> Array:
        return attention(q, *held)[0]

    x, held = operands(LENGTH, LENGTH)
    flops = 4 * heads * head_dim * LENGTH * (LENGTH + 1) / 2
    one, one_held = operands(1, CONTEXT)
    state = 2 * CONTEXT * kv_heads * head_dim * jnp.dtype(dtype).itemsize
    return Probes(Probe(run, x, held, flops), Probe(run, one, one_held, float(state)))


def mamba_probes(dtype: Any) -> Probes:
    """Mamba's convolution-free core: the selective scan of 512 channels and 16 states."""
    inner, states = 512, 16

    def probe(length: int, amount: float) -> Probe:
        dt = jnp.full((1, length, inner), 0.05, jnp.float32)
        decay = -jnp.arange(1, states + 1, dtype=jnp.float32) * jnp.ones((inner, 1))
        b, c = (_normal(i, (1, length, states), dtype) for i in (1, 2))
        z, state = _normal(3, (1, length, inner), dtype), jnp.ones((1, inner, states))

        def run(x: Array, held: Any) -> Array:
            dt, decay, b, c, z, state = held
            y, after = selective_scan(x, dt, decay, b, c, D=jnp.ones((inner,)), z=z, state=state)
            # The state must be an output, or a single step would not be computed whole.
            return y + jnp.sum(after).astype(y.dtype) * 0

        x = _normal(0, (1, length, inner), dtype)
        return Probe(run, x, (dt, decay, b, c, z, state), amount)

    flops = LENGTH * inner * (7 * states + 4)
    return Probes(probe(LENGTH, float(flops)), probe(1, 8.0 * inner * states))


def mamba2_probes(dtype: Any) -> Probes:
    """Mamba-2's core: SSD of 8 heads of 64 channels and 64 states."""
    heads, channels, states = 8, 64, 64

    def probe(length: int, amount: float) -> Probe:
        dt = jnp.full((1, length, heads), 0.05, jnp.float32)
        decay = -jnp.arange(1, heads + 1, dtype=jnp.float32)
        b, c = (_normal(i, (1, length, 1, states), dtype) for i in (1, 2))
        state = jnp.ones((1, heads, channels, states))

        def run(x: Array, held: Any) -> Array:
            dt, decay, b, c, state = held
            y, after = ssd(x, dt, decay, b, c, state=state)
            return y + jnp.sum(after).astype(y.dtype) * 0

        x = _normal(0, (1, length, heads, channels), dtype)
        return Probe(run, x, (dt, decay, b, c, state), amount)

    flops = LENGTH * heads * channels * (5 * states + 3)
    return Probes(probe(LENGTH, float(flops)), probe(1, 8.0 * heads * channels * states))


def elementwise_probes(dtype: Any) -> Probes:
    """What any other mixer is taken for: a gated sum over neighbours, memory-bound."""
    width, taps = 512, 4

    def run(x: Array, held: Array) -> Array:
        total = sum(jnp.roll(x, tap, axis=1) * held[tap] for tap in range(taps))
        return jax.nn.silu(total)

    x, held = _normal(0, (1, LENGTH, width), dtype), _normal(1, (taps, width), dtype)
    return Probes(Probe(run, x, held, 2.0 * taps * LENGTH * width), None)


OTHER = "other"
PROBES: dict[str, Callable[[Any], Probes]] = {
    "Attention": attention_probes,
    "Mamba": mamba_probes,
    "Mamba2": mamba2_probes,
    OTHER: elementwise_probes,
}


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
