"""Batch-1 decoding of a mixture of experts against dense MLPs of its total and its active size.

    python -m genlab.eval.benchmarks.moe_decode [--dtype bfloat16] [--experts 16] ...

Three stacks of MLP layers take the same tokens one by one, in a compiled loop as in decoding: the
mixture, a dense SwiGLU with as many parameters as all its experts, and one with as many as a token
uses. Each token is made from the layers' last output and fresh noise, so that it chooses its own
experts. The stacks take turns, and the median is reported: per token, in milliseconds, without
compiling.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Key

from ...errors import ConfigError
from ...paradigms.context import Context
from ...paradigms.layers.params import Build, count_params, is_float32_param, weight_bytes
from ...paradigms.mlps.moe import MoEConfig
from ...paradigms.mlps.swiglu import SwiGLUConfig
from ...paradigms.ragged import compact
from ..statistics import median

DTYPES = ("float32", "bfloat16")
EPS = 1e-6


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        width: D.
        expert_width: F of each expert.
        experts: E, those that the router chooses from.
        top_k: experts per token.
        layers: in each stack; together they should not fit into the caches.
        tokens: decoded per timed call.
    """

    width: int = 768
    expert_width: int = 1024
    experts: int = 8
    top_k: int = 2
    layers: int = 4
    tokens: int = 32


class Row(NamedTuple):
    """One stack's result.

    Attributes:
        name: moe, dense_total or dense_active.
        params: all parameters of the stack.
        read_bytes: of the parameters that one token reads, by the layers' own account.
        ms_per_token: median over the timed calls.
        compile_s: tracing and compiling.
    """

    name: str
    params: int
    read_bytes: float
    ms_per_token: float
    compile_s: float


def configs_of(sizes: Sizes) -> dict[str, Any]:
    """The three layers to compare by name.

    Raises:
        ConfigError: more experts per token than there are.
    """
    if not 1 <= sizes.top_k <= sizes.experts:
        raise ConfigError(f"top_k={sizes.top_k}: want 1 to experts={sizes.experts}")
    return {
        "moe": MoEConfig(
            width=sizes.expert_width,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            normalize_weights=sizes.top_k > 1,
        ),
        "dense_total": SwiGLUConfig(width=sizes.experts * sizes.expert_width),
        "dense_active": SwiGLUConfig(width=sizes.top_k * sizes.expert_width),
    }


def build_stack(config: Any, sizes: Sizes, dtype: str) -> tuple[Any, list[dict], nnx.Module]:
    """The layers' graph, the parameters of each layer in the compute dtype, and one layer."""

    def make(seed: int) -> nnx.Module:
        build = Build(sizes.width, sizes.layers, sizes.tokens, EPS, nnx.Rngs(seed))
        return config.build(build)

    def cast(variable: nnx.Variable) -> Array:
        value = variable.get_value()
        return value if is_float32_param(variable) else value.astype(dtype)

    params = []
    for seed in range(sizes.layers):
        flat = nnx.to_flat_state(nnx.state(make(seed), nnx.Param))
        params.append({path: cast(variable) for path, variable in flat})
    layer = nnx.eval_shape(lambda: make(0))
    graph, _ = nnx.split(layer)
    return graph, params, layer


@functools.partial(jax.jit, static_argnums=(0, 3))
def decode(
    graph: Any, params: list[dict], x: Float[Array, "1 1 D"], tokens: int, key: Key[Array, ""]
) -> Float[Array, "1 1 D"]:
    """Runs so many tokens through the stack, one after another; returns the last output."""
    ctx = compact(jnp.zeros((1, 1), jnp.int32), None, Context()).layer_ctx
    layers = [nnx.merge(graph, nnx.from_flat_state(flat.items())) for flat in params]

    def norm(x: Array) -> Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2) + EPS)).astype(x.dtype)

    def one_token(t: Array, x: Array) -> Array:
        x = norm(x + jax.random.normal(jax.random.fold_in(key, t), x.shape, x.dtype))
        for layer in layers:
            x += layer(norm(x), ctx)[0]
        return x

    return jax.lax.fori_loop(0, tokens, one_token, x)


def measure(
    sizes: Sizes,
    dtype: str = "float32",
    *,
    repeats: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Measures the three stacks in turns.

    Args:
        sizes: of the stacks.
        dtype: of the parameters and activations; routers stay float32.
        repeats: timed calls of each stack, after one that warms up.
        clock: seconds.

    Raises:
        ConfigError: the sizes or the number of repeats do not make sense.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: want at least 1")
    for name, value in sizes._asdict().items():
        if value < 1:
            raise ConfigError(f"{name}={value}: want at least 1")
    x = jnp.ones((1, 1, sizes.width), dtype)
    ready, about = {}, {}
    for name, config in configs_of(sizes).items():
        graph, params, layer = build_stack(config, sizes, dtype)
        begun = clock()
        compiled = decode.lower(graph, params, x, sizes.tokens, jax.random.key(0)).compile()
        compile_s = clock() - begun
        ready[name] = functools.partial(compiled, params, x)
        size = jnp.dtype(dtype).itemsize
        read = layer.weight_bytes(1, size) if name == "moe" else weight_bytes(layer, size)
        about[name] = (sizes.layers * count_params(layer), sizes.layers * read, compile_s)
        jax.block_until_ready(ready[name](jax.random.key(0)))
    names, times = list(ready), {name: [] for name in ready}
    for repeat in range(repeats):
        key = jax.random.key(repeat + 1)
        first = repeat % len(names)  # none is always the one after the largest
        for name in names[first:] + names[:first]:
            begun = clock()
            jax.block_until_ready(ready[name](key))
            times[name].append(1e3 * (clock() - begun) / sizes.tokens)
    rows = []
    for name in names:
        params, read, compile_s = about[name]
        rows.append(Row(name, params, read, median(np.array(times[name])), compile_s))
    return rows


def report(rows: Sequence[Row]) -> list[str]:
    """A table and the mixture's ratios, by time and by the bytes that a token reads."""
    lines = [f"{'':13}{'params':>13}{'MB read':>10}{'ms/token':>10}{'compile s':>11}"]
    for row in rows:
        lines.append(
            f"{row.name:13}{row.params:13,}{row.read_bytes / 1e6:10.1f}"
            f"{row.ms_per_token:10.3f}{row.compile_s:11.1f}"
        )
    moe, *others = rows
    for other in others:
        lines.append(
            f"moe / {other.name}: {moe.ms_per_token / other.ms_per_token:.2f} of the time, "
            f"{moe.read_bytes / other.read_bytes:.2f} of the bytes"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="moe_decode", description=__doc__.splitlines()[0])
    for name, default in Sizes()._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each; default 15")
    parser.add_argument("--json", action="store_true", help="print records, not a table")
    given = vars(parser.parse_args(arguments))
    sizes = Sizes(**{name: given[name] for name in Sizes._fields})
    try:
        rows = measure(sizes, given["dtype"], repeats=given["repeats"])
    except ConfigError as error:
        parser.error(str(error))
    if given["json"]:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
