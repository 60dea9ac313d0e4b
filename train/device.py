"""Which device runs things, and where compiled programs are kept."""

from typing import Any

import jax

from ..errors import ConfigError, suggest
from .data.cache import default_cache_dir

PLATFORMS = ("cpu", "gpu", "tpu")
WORTH_KEEPING_S = 0.5  # compile time from which a program is kept


def prepare_device(console: Any, *, require: str | None = None) -> None:
    """Names the device and switches on the cache of compiled programs; commands call it once.

    Args:
        console: prints the line.
        require: "cpu", "gpu" or "tpu": refuse to run on anything else.

    Raises:
        ConfigError: another device is in use, or `require` is no platform.
    """
    if require is not None and require not in PLATFORMS:
        raise ConfigError(f"--require {require!r}: no such platform{suggest(require, PLATFORMS)}")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"no device: {' '.join(str(error).split())}") from None
    platform = devices[0].platform
    if require is not None and platform != require:
        raise ConfigError(
            f"--require {require}: JAX {jax.__version__} found only {platform}; install the "
            f"accelerator's extra (pip install 'genlab[cuda]' or 'genlab[tpu]')"
        )
    enable_compile_cache()
    console.print(f"device: {describe_device()}", highlight=False, markup=False)


def describe_device() -> str:
    """Platform, kind and number of the devices."""
    devices = jax.devices()
    count = f" ({len(devices)}, the first is used)" if len(devices) > 1 else ""
    return f"{devices[0].platform}: {devices[0].device_kind}{count}, JAX {jax.__version__}"


def enable_compile_cache() -> None:
    """Keeps compiled programs below the user's cache folder, unless JAX was told another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_S)
