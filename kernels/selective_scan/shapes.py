"""Named shapes for tests and benchmarks, and the sizes that the implementations are tuned by."""

from typing import NamedTuple


class SelectiveScanShape(NamedTuple):
    """Sizes of one call: batch, steps, inner width E, state size M."""

    batch: int
    length: int
    inner: int
    states: int


TINY = SelectiveScanShape(batch=2, length=37, inner=6, states=4)
QUICK = SelectiveScanShape(batch=4, length=256, inner=256, states=16)
QUICK_LARGE_BATCH = SelectiveScanShape(batch=16, length=256, inner=256, states=16)
MAMBA_115M = SelectiveScanShape(batch=1, length=2048, inner=1536, states=16)
MAMBA_2_8B = SelectiveScanShape(batch=1, length=2048, inner=5120, states=16)
MAMBA_115M_DECODE = SelectiveScanShape(batch=8, length=1, inner=1536, states=16)

# Steps per chunk of `xla_chunked`. 8, 16 and 32 differ by less than the noise on a CPU; the states
# of a chunk (C B M E floats) should stay in the last-level cache.
CHUNK = 16

# `xla_associative` holds two float32 arrays of B T M E.
ASSOCIATIVE_BYTES_MAX = 4 * 2**30

# `pallas_tpu`: steps per chunk and the unit of channels per block, both whole lanes of a register;
# the unit of steps of a single shorter chunk, a tile of bfloat16; state values per block (8
# registers in the loop over time: more would spill in the backward pass); the most state
# dimensions, for the backward pass holds TPU_CHUNK states at once (8 MiB).
TPU_CHUNK = 128
TPU_SHORTEST = 16
TPU_LANES = 128
TPU_STATE_VALUES = 8192
TPU_MAX_STATES = 128

# `pallas_mosaic_gpu`: steps of a segment, for each of which the backward pass holds a quarter of a
# state in shared memory (64 KiB at M = 16, so that three blocks fit); the most state dimensions.
GPU_SEGMENT = 32
GPU_MAX_STATES = 32

# `pallas_triton`: the most state dimensions; more would spill.
TRITON_MAX_STATES = 64
