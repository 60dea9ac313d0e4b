"""Named shapes for tests and benchmarks, and the chunk lengths."""

from typing import NamedTuple


class SsdShape(NamedTuple):
    """Sizes of one call: batch, steps, heads N, channels per head P, groups G, state size M."""

    batch: int
    length: int
    heads: int
    channels: int
    groups: int
    states: int


TINY = SsdShape(batch=2, length=37, heads=4, channels=3, groups=2, states=5)
QUICK = SsdShape(batch=4, length=256, heads=8, channels=32, groups=1, states=64)
QUICK_LARGE_BATCH = SsdShape(batch=16, length=256, heads=8, channels=32, groups=1, states=64)
MAMBA2_140M = SsdShape(batch=1, length=2048, heads=24, channels=64, groups=1, states=128)
MAMBA2_2_7B = SsdShape(batch=1, length=2048, heads=80, channels=64, groups=1, states=128)
MAMBA2_140M_DECODE = SsdShape(batch=8, length=1, heads=24, channels=64, groups=1, states=128)

# Default steps per chunk by platform. On a CPU 32 beat 16, 64 and 128 at the QUICK shapes; the
# paper uses 64 to 256 where matrix units are wide.
CHUNK = {"cpu": 32, "gpu": 64, "tpu": 128}

# Up to here the recurrence is at least as fast as the matrix form (CPU, 140M shapes, batch 1).
FEW_STEPS = 4

# `pallas_tpu`: the unit of a chunk, whole lanes of a register, and of a single shorter chunk, a
# tile of bfloat16; the most values of a block's states or inputs (512 KiB of float32 each).
TPU_LANES = 128
TPU_SHORTEST = 16
TPU_STATE_VALUES = 131072

# Kernels for GPUs: heads of a group that share a program; the most values of a head's state: for
# `pallas_mosaic_gpu` it fills 48 KiB of the 192 KiB of shared memory that the backward pass takes,
# for `pallas_triton` it is in registers with the chunk's matrices.
GPU_HEADS = 8
GPU_STATE_VALUES = 8192
TRITON_STATE_VALUES = 16384
