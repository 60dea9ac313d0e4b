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
