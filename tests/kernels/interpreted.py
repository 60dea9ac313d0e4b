"""Runs Pallas kernels for accelerators on the CPU."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
from genlab.kernels.compat import assume_platform
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

# JAX 0.10 can only lower Mosaic GPU's kernels.
HAS_GPU_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")

PLATFORM = {"pallas_mosaic_gpu": "gpu", "pallas_tpu": "tpu", "pallas_triton": "gpu"}


@contextlib.contextmanager
def interpreted(implementation: str) -> Iterator[None]:
    """Ops choose as on the implementation's platform, and its kernels are interpreted.

    Memory that was not written holds NaN.
    """
    with assume_platform(PLATFORM[implementation]):
        if implementation == "pallas_mosaic_gpu":
            params = plgpu.InterpretGPUParams(detect_races=True)  # it raises if it finds one
            with plgpu.force_gpu_interpret_mode(params):
                yield
        else:  # `True`: as plain operations of XLA, block by block
            one_thread = mock.patch.object(pltriton, "debug_barrier", lambda: None)
            with pltpu.force_tpu_interpret_mode(True), one_thread:
                yield


@contextlib.contextmanager
def simulated_tpu(capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The simulator of a TPU's memories and copies; fails if two accesses race."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with assume_platform("tpu"), pltpu.force_tpu_interpret_mode(params):
        yield
    told = capfd.readouterr()
    assert "RACE DETECTED" not in told.out + told.err + caplog.text
