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
MAMBA_115M_DECODE = SelectiveScanShape(batch=8, length=1, inner=1536, states=16)

# Steps per chunk of `xla_chunked`. 8, 16 and 32 differ by less than the noise on a CPU; the states
# of a chunk (C B M E floats) should stay in the last-level cache.
CHUNK = 16

# `xla_associative` holds two float32 arrays of B T M E.
ASSOCIATIVE_BYTES_MAX = 4 * 2**30
