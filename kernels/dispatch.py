"""One rule for choosing which implementation of an op runs, shared by every op.

An op keeps a table `{name: Implementation}`. The caller's `implementation` argument means:

- `None`: the first entry of the op's own preference list (fastest verified first, made for this
  device and these shapes) that supports the arguments. `reference` is never in that list.
- a name: that implementation, or an error with the reason why it cannot run.
- a sequence of names: the first that supports the arguments; if all refuse, one error carries
  every reason.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import GenlabError, suggest
from .compat import compute_capability, target_platform

# Ampere: the first with bfloat16 and asynchronous copies, which Triton's kernels count on.
_LEAST_CAPABILITY = 8.0


class KernelArgumentError(GenlabError, ValueError):
    """An op was called with arguments, or with an `implementation`, that it cannot take."""


def supports_all(*args: Any, **kwargs: Any) -> str | None:
    """The `supports` of an implementation that takes whatever the op's own checks let through."""
    del args, kwargs
    return None


class Implementation(NamedTuple):
    """One way of computing an op.

    Attributes:
        run: takes the op's checked arguments and returns the op's result.
        supports: takes the same arguments, returns None or the reason why `run` cannot take them.
            It looks at shapes, dtypes and the device only, so it can be asked while tracing.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None] = supports_all


def refuse_platform(platform: str, capability: float = 0.0) -> str | None:
    """Returns why a kernel made for `platform` cannot run where this program will, or None.

    Args:
        platform: "gpu" (NVIDIA's) or "tpu".
        capability: the least compute capability of the GPU: 9.0 for Hopper.
    """
    target = target_platform()
    if target != platform:
        return f"it needs a {platform.upper()}; this program is for a {target.upper()}"
    if platform == "gpu" and compute_capability() < max(capability, _LEAST_CAPABILITY):
        wanted = max(capability, _LEAST_CAPABILITY)
        return f"it needs a GPU of compute capability {wanted}; this one has {compute_capability()}"
    return None


def choose(
    op: str,
    table: Mapping[str, Implementation],
    preferred: Sequence[str],
    requested: str | Sequence[str] | None,
    *args: Any,
    **kwargs: Any,
) -> str:
    """Returns the name of the implementation that runs `op` on these arguments.

    Args:
        op: the op's name, for messages.
        table: every implementation of the op by name.
        preferred: names for `requested=None`, fastest first; must not hold "reference".
        requested: the caller's `implementation` argument (see the module's docstring).
        *args: the op's checked arguments, passed on to `supports`.
        **kwargs: likewise.

    Raises:
        KernelArgumentError: a name is unknown, or no candidate supports the arguments.
    """
    if requested is None:
        names = list(preferred)
    elif isinstance(requested, str):
        names = [requested]
    else:
        names = list(requested)
        if not names:
            raise KernelArgumentError(
                f"{op}: implementation is an empty sequence; want a name, names or None"
            )
    for name in names:
        if not isinstance(name, str):
            raise KernelArgumentError(f"{op}: implementation {name!r} is not a name")
        if name not in table:
            hint = suggest(name, table)
            raise KernelArgumentError(f"{op}: unknown implementation {name!r}{hint}")
    reasons = {}
    for name in names:
        reason = table[name].supports(*args, **kwargs)
        if reason is None:
            return name
        reasons[name] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise KernelArgumentError(f"{op}: no implementation supports these arguments: {told}")


def check_array(
    op: str, name: str, array: Any, shape: tuple[int, ...] | str, kind: str = "floating"
) -> None:
    """Checks one argument of an op before anything is computed.

    Args:
        op: the op's name, for messages.
        name: the argument's name.
        array: the value given.
        shape: the exact shape wanted, or the letters of its axes if only the rank is known yet
            ("B T E").
        kind: "floating", "float32", "integer" or "bool".

    Raises:
        KernelArgumentError: it names the argument, what was given and what was wanted.
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise KernelArgumentError(f"{op}: {name} is a {type(array).__name__}; want an array")
    rank_only = isinstance(shape, str)
    rank = len(shape.split()) if rank_only else len(shape)
    if len(array.shape) != rank or (not rank_only and tuple(array.shape) != tuple(shape)):
        wanted = f"[{shape}]" if rank_only else str(tuple(shape))
        raise KernelArgumentError(f"{op}: {name} has shape {tuple(array.shape)}; want {wanted}")
    dtype = jnp.dtype(array.dtype)
    right = {
        "floating": jnp.issubdtype(dtype, jnp.floating),
        "float32": dtype == jnp.float32,
        "integer": jnp.issubdtype(dtype, jnp.integer),
        "bool": dtype == jnp.bool_,
    }[kind]
    if not right:
        raise KernelArgumentError(f"{op}: {name} has dtype {dtype}; want {kind}")


def valid_mask(lengths: jax.Array, length: int) -> jax.Array:
    """Returns bool [B T]: True where a step lies before its row's length (lengths [B])."""
    return jnp.arange(length, dtype=jnp.int32)[None, :] < lengths.astype(jnp.int32)[:, None]
