"""Named shapes for tests and benchmarks."""

from typing import NamedTuple


class CausalConv1dShape(NamedTuple):
    """Sizes of one call: batch, steps, inner width E, taps W."""

    batch: int
    length: int
    inner: int
    width: int


TINY = CausalConv1dShape(batch=2, length=37, inner=6, width=4)
QUICK = CausalConv1dShape(batch=4, length=256, inner=256, width=4)
QUICK_LARGE_BATCH = CausalConv1dShape(batch=16, length=256, inner=256, width=4)
MAMBA_115M = CausalConv1dShape(batch=1, length=2048, inner=1536, width=4)
MAMBA_115M_DECODE = CausalConv1dShape(batch=8, length=1, inner=1536, width=4)
MAMBA2_140M = CausalConv1dShape(batch=1, length=2048, inner=1792, width=4)
MAMBA2_140M_DECODE = CausalConv1dShape(batch=8, length=1, inner=1792, width=4)
