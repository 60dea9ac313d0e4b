"""Which implementation of which kernel runs on the device that is used, and why another does not.

Each op is traced, and not run, on shapes of a small model: a prompt and one decoded token, in both
dtypes. The answer is the one that a model would get.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import kernels
from ..errors import suggest
from ..kernels.attention.mask import AttentionMask
from ..kernels.dispatch import Implementation, KernelArgumentError
from .record import Record

B, HEADS, WIDTH, STATES, TAPS, EXPERTS, PAGES = 1, 4, 64, 16, 4, 4, 8
LENGTHS = {"prompt": 128, "decode": 1}
DTYPES = ("float32", "bfloat16")


class KernelSupport(Record):
    """What one implementation of an op can run.

    Attributes:
        op: the kernel.
        name: of the implementation.
        runs: the cases that it takes: "prompt float32" and so on.
        refused: the cases that it does not take, with the reason.
    """

    op: str
    name: str
    runs: list[str]
    refused: dict[str, str]


def kernel_support() -> list[KernelSupport]:
    """Asks every implementation of every op.

    Raises:
        KernelArgumentError: an op has no arguments to be asked with.
    """
    found = []
    for op, table in ops().items():
        if op not in ARGUMENTS:
            raise KernelArgumentError(f"kernel {op}: has no example{suggest(op, ARGUMENTS)}")
        found += [_ask(op, name) for name in table]
    return found


def ops() -> dict[str, Mapping[str, Implementation]]:
    """The implementations of every op by name: each folder of `kernels` is one."""
    folders = [m.name for m in pkgutil.iter_modules(kernels.__path__) if m.ispkg]
    return {name: _api(name).IMPLEMENTATIONS for name in sorted(folders)}


def _api(op: str) -> Any:
    return importlib.import_module(f"{kernels.__name__}.{op}.api")


def _ask(op: str, name: str) -> KernelSupport:
    runs, refused = [], {}
    for case, length in LENGTHS.items():
        for dtype in DTYPES:
            arguments = ARGUMENTS[op](length, jnp.dtype(dtype))
            call = getattr(_api(op), op)
            try:
                jax.eval_shape(lambda *a, call=call: call(*a, implementation=name), *arguments)
                runs.append(f"{case} {dtype}")
            except KernelArgumentError as error:
                refused[f"{case} {dtype}"] = str(error).rpartition(f" {name}: ")[2]
    return KernelSupport(op=op, name=name, runs=runs, refused=refused)


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention(length: int, dtype: Any) -> tuple:
    keys = max(LENGTHS.values())
    q = _array((B, length, HEADS, WIDTH), dtype)
    k = _array((B, keys, HEADS // 2, WIDTH), dtype)
    rows, columns = _array((B, length), jnp.int32), _array((B, keys), jnp.int32)
    given = {"q_lo": rows, "q_hi": rows, "q_segment": rows, "k_order": columns,
             "k_segment": columns}  # fmt: skip
    mask = AttentionMask(**{name: given.get(name) for name in AttentionMask._fields})
    return q, k, k, mask


def _causal_conv1d(length: int, dtype: Any) -> tuple:
    return _array((B, length, WIDTH), dtype), _array((TAPS, WIDTH), dtype)


def _cross_entropy(length: int, dtype: Any) -> tuple:
    targets = _array((length,), jnp.int32)
    return _array((length, WIDTH), dtype), _array((WIDTH, WIDTH), dtype), targets


def _grouped_matmul(length: int, dtype: Any) -> tuple:
    weights = _array((EXPERTS, WIDTH, WIDTH), dtype)
    return _array((length, WIDTH), dtype), weights, _array((EXPERTS,), jnp.int32)


def _paged_attention(length: int, dtype: Any) -> tuple:
    q = _array((B, length, HEADS, WIDTH), dtype)
    pool = _array((PAGES, max(LENGTHS.values()) // PAGES, HEADS // 2, WIDTH), dtype)
    return q, pool, pool, _array((B, PAGES), jnp.int32), _array((B,), jnp.int32)


def _selective_scan(length: int, dtype: Any) -> tuple:
    x, projection = _array((B, length, WIDTH), dtype), _array((B, length, STATES), dtype)
    decay = _array((WIDTH, STATES), jnp.float32)
    return x, _array((B, length, WIDTH), jnp.float32), decay, projection, projection


def _ssd(length: int, dtype: Any) -> tuple:
    x = _array((B, length, HEADS, WIDTH // HEADS), dtype)
    dt = _array((B, length, HEADS), jnp.float32)
    projection = _array((B, length, 1, STATES), dtype)
    return x, dt, _array((HEADS,), jnp.float32), projection, projection


ARGUMENTS: dict[str, Callable[[int, Any], tuple]] = {
    "attention": _attention,
    "causal_conv1d": _causal_conv1d,
    "cross_entropy": _cross_entropy,
    "grouped_matmul": _grouped_matmul,
    "paged_attention": _paged_attention,
    "selective_scan": _selective_scan,
    "ssd": _ssd,
}
