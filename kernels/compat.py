"""What differs between JAX releases and devices; nothing else in the package asks."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax

PLATFORMS = ("cpu", "gpu", "tpu")

# JAX keeps what it traced under each value apart.
_assumed = jax.make_user_context(None)


def target_platform() -> str:
    """Returns the platform ("cpu", "gpu" or "tpu") that a computation traced now will run on.

    What `assume_platform` says comes first. Else `jax.default_device` wins over the default
    backend, as it does in JAX itself.
    """
    if _assumed.value is not None:
        return _assumed.value
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    if isinstance(device, str):
        return "gpu" if device in ("cuda", "rocm") else device
    return device.platform


@contextlib.contextmanager
def assume_platform(platform: str) -> Iterator[None]:
    """Traces what is inside for another platform than the host's (ahead-of-time compilation).

    Every op then chooses as it would there. Lowering is told the platform separately.

    Args:
        platform: one of `PLATFORMS`.

    Raises:
        ValueError: there is no such platform.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform is {platform!r}; want one of {', '.join(PLATFORMS)}")
    with _assumed(platform):
        yield


def compute_capability() -> float:
    """Returns that of the NVIDIA GPU a computation traced now will run on: 9.0 for Hopper.

    A GPU that is only assumed counts as a Hopper; one that is not NVIDIA's, or none, as 0.0.
    """
    if target_platform() != "gpu":
        return 0.0
    if _assumed.value is not None:
        return 9.0
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend="gpu")[0]
    try:
        return float(getattr(device, "compute_capability", 0.0))
    except ValueError:  # ROCm answers with the name of an architecture
        return 0.0


def load_with_layout(ref: Any, layout: Any) -> jax.Array:
    """Reads shared memory into the registers of a warpgroup in a layout of Mosaic GPU.

    It may be a layout that reads slowly. JAX 0.10 wants an index, which later releases refuse.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def transposed(ref: Any) -> Any:
    """Returns a matrix in shared memory with its axes swapped, as a factor of a product."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    swap = getattr(plgpu, "transpose_ref", None)  # JAX 0.10
    return ref.transpose((1, 0)) if swap is None else swap(ref, (1, 0))
