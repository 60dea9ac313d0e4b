"""Kernels one by one: every implementation that this device takes, forward and with gradients."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ConfigError, suggest
from ...kernels.attention import AttentionMask, attention
from ...kernels.attention.shapes import SHAPES as ATTENTION_SHAPES
from ...kernels.causal_conv1d import causal_conv1d
from ...kernels.causal_conv1d import shapes as conv_shapes
from ...kernels.cross_entropy import cross_entropy
from ...kernels.cross_entropy import shapes as loss_shapes
from ...kernels.grouped_matmul import grouped_matmul
from ...kernels.grouped_matmul import shapes as group_shapes
from ...kernels.paged_attention import paged_attention
from ...kernels.paged_attention.shapes import SHAPES as PAGED_SHAPES
from ...kernels.selective_scan import selective_scan
from ...kernels.selective_scan import shapes as scan_shapes
from ...kernels.ssd import shapes as ssd_shapes
from ...kernels.ssd import ssd
from ..cost.arithmetic import bandwidth_at
from ..cost.records import Machine
from ..kernel_support import ops
from .alternate import Timed
from .records import Floor

DIRECTIONS = ("forward", "forward_backward")


class Call(NamedTuple):
    """An op on arrays of one shape.

    Attributes:
        run: (arrays, implementation) -> the op's result, one array.
        arrays: differentiable ones, by name.
        flops: of the forward pass, by the equation.
        backward: how many times the forward's FLOPs forward and backward take together.
        batch, length: for the record.
    """

    run: Callable[[dict, str | None], jax.Array]
    arrays: dict[str, jax.Array]
    flops: float
    backward: float
    batch: int
    length: int


class KernelReady(NamedTuple):
    """A compiled call of one implementation."""

    subject: Timed
    compile_s: float


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(drawn, dtype)


def _attention(s: Any, dtype: Any) -> Call:
    order = jnp.broadcast_to(jnp.arange(s.keys, dtype=jnp.int32), (s.batch, s.keys))
    zeros = jnp.zeros((s.batch, s.keys), jnp.int32)
    last = s.keys - s.queries
    mask = AttentionMask(
        q_lo=zeros[:, : s.queries], q_hi=order[:, last:], k_order=order,
        q_segment=zeros[:, : s.queries], k_segment=zeros,
    )  # fmt: skip
    arrays = {
        "q": _normal(0, (s.batch, s.queries, s.heads, s.head_dim), dtype),
        "k": _normal(1, (s.batch, s.keys, s.kv_heads, s.head_dim), dtype),
        "v": _normal(2, (s.batch, s.keys, s.kv_heads, s.head_dim), dtype),
    }
    pairs = s.queries * (s.keys - (s.queries - 1) / 2)

    def run(a: dict, implementation: str | None) -> jax.Array:
        return attention(a["q"], a["k"], a["v"], mask, implementation=implementation)[0]

    # Two products of all pairs forward, five backward (FlashAttention-2, arXiv 2307.08691).
    flops = 4 * s.batch * s.heads * s.head_dim * pairs
    return Call(run, arrays, flops, 3.5, s.batch, s.keys)


def _selective_scan(s: Any, dtype: Any) -> Call:
    by_channel, by_state = (s.batch, s.length, s.inner), (s.batch, s.length, s.states)
    decay = -jnp.arange(1, s.states + 1, dtype=jnp.float32) * jnp.ones((s.inner, 1))
    arrays = {
        "x": _normal(0, by_channel, dtype),
        "dt": jax.nn.softplus(_normal(1, by_channel, jnp.float32) - 4),
        "A": decay,
        "B": _normal(2, by_state, dtype),
        "C": _normal(3, by_state, dtype),
        "z": _normal(4, by_channel, dtype),
    }

    def run(a: dict, implementation: str | None) -> jax.Array:
        inputs = (a[name] for name in ("x", "dt", "A", "B", "C"))
        return selective_scan(*inputs, z=a["z"], implementation=implementation)[0]

    flops = float(s.batch * s.length * s.inner * (7 * s.states + 4))
    return Call(run, arrays, flops, 3.0, s.batch, s.length)


def _ssd(s: Any, dtype: Any) -> Call:
    by_group = (s.batch, s.length, s.groups, s.states)
    arrays = {
        "x": _normal(0, (s.batch, s.length, s.heads, s.channels), dtype),
        "dt": jax.nn.softplus(_normal(1, (s.batch, s.length, s.heads), jnp.float32) - 4),
        "A": -jnp.arange(1, s.heads + 1, dtype=jnp.float32),
        "B": _normal(2, by_group, dtype),
        "C": _normal(3, by_group, dtype),
    }

    def run(a: dict, implementation: str | None) -> jax.Array:
        inputs = (a[name] for name in ("x", "dt", "A", "B", "C"))
        return ssd(*inputs, implementation=implementation)[0]

    flops = float(s.batch * s.length * s.heads * s.channels * (5 * s.states + 3))
    return Call(run, arrays, flops, 3.0, s.batch, s.length)


def _causal_conv1d(s: Any, dtype: Any) -> Call:
    arrays = {
        "x": _normal(0, (s.batch, s.length, s.inner), dtype),
        "kernel": _normal(1, (s.width, s.inner), dtype),
    }

    def run(a: dict, implementation: str | None) -> jax.Array:
        return causal_conv1d(a["x"], a["kernel"], implementation=implementation)[0]

    flops = float(2 * s.batch * s.length * s.inner * s.width)
    return Call(run, arrays, flops, 3.0, s.batch, s.length)


def _cross_entropy(s: Any, dtype: Any) -> Call:
    targets = jnp.asarray(np.random.default_rng(2).integers(0, s.vocab, s.tokens), jnp.int32)
    arrays = {
        "hidden": _normal(0, (s.tokens, s.width), dtype),
        "weight": _normal(1, (s.width, s.vocab), dtype) * jnp.asarray(0.02, dtype),
    }

    def run(a: dict, implementation: str | None) -> jax.Array:
        return cross_entropy(a["hidden"], a["weight"], targets, implementation=implementation)[0]

    return Call(run, arrays, float(2 * s.tokens * s.width * s.vocab), 3.0, 1, s.tokens)


def _grouped_matmul(s: Any, dtype: Any) -> Call:
    sizes = np.full(s.groups, s.rows // s.groups, np.int32)
    sizes[: s.rows - sizes.sum()] += 1
    arrays = {"x": _normal(0, (s.rows, s.inner), dtype)}
    for group in range(s.groups):
        arrays[f"w{group}"] = _normal(1 + group, (s.inner, s.outer), dtype)

    def run(a: dict, implementation: str | None) -> jax.Array:
        w = [a[f"w{group}"] for group in range(s.groups)]
        return grouped_matmul(a["x"], w, jnp.asarray(sizes), implementation=implementation)

    return Call(run, arrays, float(2 * s.rows * s.inner * s.outer), 3.0, 1, s.rows)


def _paged_attention(s: Any, dtype: Any) -> Call:
    blocks = -(-s.keys // s.block)
    pool = (s.batch * blocks, s.block, s.kv_heads, s.head_dim)
    arrays = {
        "q": _normal(0, (s.batch, s.queries, s.heads, s.head_dim), dtype),
        "k_pool": _normal(1, pool, dtype),
        "v_pool": _normal(2, pool, dtype),
    }
    # Scattered, as a pool is after a while.
    table = np.random.default_rng(3).permutation(pool[0]).reshape(s.batch, blocks)
    table = jnp.asarray(table, jnp.int32)
    lengths = jnp.full((s.batch,), s.keys, jnp.int32)
    pairs = s.queries * (s.keys - (s.queries - 1) / 2)

    def run(a: dict, implementation: str | None) -> jax.Array:
        pools = a["q"], a["k_pool"], a["v_pool"]
        return paged_attention(*pools, table, lengths, implementation=implementation)[0]

    flops = 4 * s.batch * s.heads * s.head_dim * pairs
    return Call(run, arrays, flops, 1.0, s.batch, s.keys)


def _named(module: Any) -> dict[str, Any]:
    """The shapes of a kernel's `shapes.py`: its constants that are named tuples."""
    return {n.lower(): v for n, v in vars(module).items() if n.isupper() and hasattr(v, "_fields")}


class Kernel(NamedTuple):
    """How an op is benched; `directions` lacks the backward pass where an op has none."""

    make: Callable[[Any, Any], Call]
    shapes: Mapping[str, Any]
    default: tuple[str, ...]
    directions: tuple[str, ...] = DIRECTIONS


KERNELS: dict[str, Kernel] = {
    "attention": Kernel(
        _attention, ATTENTION_SHAPES, ("134m_train", "134m_prefill", "134m_decode")
    ),
    "selective_scan": Kernel(_selective_scan, _named(scan_shapes), ("quick", "mamba_115m")),
    "ssd": Kernel(_ssd, _named(ssd_shapes), ("quick", "mamba2_140m")),
    "causal_conv1d": Kernel(_causal_conv1d, _named(conv_shapes), ("mamba_115m",)),
    "cross_entropy": Kernel(_cross_entropy, _named(loss_shapes), ("quick", "transformer_134m")),
    "grouped_matmul": Kernel(_grouped_matmul, _named(group_shapes), ("quick", "moe_134m_decode")),
    "paged_attention": Kernel(_paged_attention, PAGED_SHAPES, ("134m_decode",), ("forward",)),
}


def kernel_of(op: str) -> Kernel:
    """How an op is benched.

    Raises:
        ConfigError: no such op.
    """
    if op not in KERNELS:
        raise ConfigError(f"--op {op!r}: no such kernel{suggest(op, KERNELS)}")
    return KERNELS[op]


def make_call(op: str, shape: str, dtype: str) -> Call:
    """The op on random arrays.

    Raises:
        ConfigError: no such op or shape.
    """
    kernel = kernel_of(op)
    if shape not in kernel.shapes:
        raise ConfigError(f"--shape {shape!r}: {op} has none{suggest(shape, kernel.shapes)}")
    return kernel.make(kernel.shapes[shape], jnp.dtype(dtype))


def implementations_of(op: str) -> list[str]:
    """Names of all implementations but the reference."""
    return [name for name in ops()[op] if name != "reference"]


def prepare_kernel(call: Call, implementation: str, direction: str, label: str) -> KernelReady:
    """Compiles one implementation.

    Raises:
        KernelArgumentError: it cannot run here, or not on these arguments.
    """
    run = functools.partial(call.run, implementation=implementation)
    if direction == "forward":
        function: Callable = run
    else:
        shape = jax.eval_shape(run, call.arrays)
        cotangent = _normal(9, shape.shape, shape.dtype)

        def function(arrays: dict) -> Any:
            y, back = jax.vjp(run, arrays)
            return y, back(cotangent)

    begin = time.perf_counter()
    compiled = jax.jit(function).lower(call.arrays).compile()
    compile_s = time.perf_counter() - begin
    jax.block_until_ready(compiled(call.arrays))
    begin = time.perf_counter()
    jax.block_until_ready(compiled(call.arrays))
    # Short calls several at a time: the clock and the wait cost microseconds.
    times = max(1, min(100, round(5e-3 / max(1e-6, time.perf_counter() - begin))))

    def timed() -> int:
        for _ in range(times):
            result = compiled(call.arrays)
        jax.block_until_ready(result)
        return times

    return KernelReady(Timed(label, timed), compile_s)


def kernel_floor(call: Call, direction: str, machine: Machine) -> Floor:
    """Every array read once and every result written once, or the equation's FLOPs at the peak."""
    shape = jax.eval_shape(functools.partial(call.run, implementation=None), call.arrays)
    read = sum(array.nbytes for array in call.arrays.values())
    written = shape.size * shape.dtype.itemsize
    flops = call.flops
    if direction == "forward_backward":
        # The backward pass reads the inputs and the cotangent and writes a gradient of each.
        moved = 3 * read + 2 * written
        flops *= call.backward
    else:
        moved = read + written
    return Floor(
        flops=flops,
        bytes_moved=float(moved),
        flops_per_s=machine.peak_flops_per_s,
        bytes_per_s=bandwidth_at(machine, moved),
    )
