"""Lowers a function for an accelerator that is not there.

Lowering ends before the vendor's own compiler (ptxas, libtpu) begins. It does run Pallas' checks
of layouts, tilings and shared memory, and the text that comes out tells which kernels are in it.
"""

import re
from collections.abc import Callable

import jax
from genlab.kernels.compat import assume_platform
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

# What the lowered text calls a kernel by each Pallas backend, on JAX 0.10 and 0.12 alike.
CUSTOM_CALL = {
    "pallas_mosaic_gpu": "mosaic_gpu_v2",
    "pallas_tpu": "tpu_custom_call",
    "pallas_triton": "__gpu$xla.gpu.triton",
}

_DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
}


def lowered_text(platform: str, function: Callable, *arguments) -> str:
    """Returns the StableHLO of `function` lowered for a platform, whatever device is present.

    Its ops choose their implementations as they do on that platform.

    Args:
        platform: "cuda" (a Hopper GPU) or "tpu" (a v5e).
        function: what to lower.
        *arguments: arrays, or `jax.ShapeDtypeStruct`s: nothing is computed.
    """
    device = _DEVICES[platform]
    mesh = AbstractMesh((1,), ("device",), abstract_device=device)
    with use_abstract_mesh(mesh), assume_platform(device.platform):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def kernels_in(text: str) -> set[str]:
    """Returns the names of the Pallas backends whose kernels a lowered text calls."""
    targets = set(re.findall(r"custom_call @([\w.$]+)", text))
    return {name for name, target in CUSTOM_CALL.items() if target in targets}
