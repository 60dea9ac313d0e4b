"""What differs between JAX releases and devices; nothing else in the package asks."""

import jax


def target_platform() -> str:
    """Returns the platform ("cpu", "gpu" or "tpu") that a computation traced now will run on.

    `jax.default_device` wins over the default backend, as it does in JAX itself. A program that is
    lowered for another platform than its host's (ahead-of-time compilation) names its
    implementation instead of relying on this.
    """
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    if isinstance(device, str):
        return "gpu" if device in ("cuda", "rocm") else device
    return device.platform


def float32_precision() -> jax.lax.Precision | None:
    """Returns the `precision` that makes matmuls of float32 arrays float32 on the target.

    GPUs and TPUs round the inputs unless told otherwise. CPUs never do, and XLA's CPU backend has
    slower code for an explicit HIGHEST.
    """
    return None if target_platform() == "cpu" else jax.lax.Precision.HIGHEST
