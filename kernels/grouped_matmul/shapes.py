"""Named shapes for tests and benchmarks, and the sizes of blocks."""

from typing import NamedTuple

import jax.numpy as jnp

from ..compat import target_platform


class GroupedMatmulShape(NamedTuple):
    """T rows, E groups, D and F the matrices' sizes."""

    rows: int
    groups: int
    inner: int
    outer: int


TINY = GroupedMatmulShape(rows=37, groups=4, inner=5, outer=3)
QUICK = GroupedMatmulShape(rows=2048, groups=8, inner=128, outer=256)
# Mixtral's 8 experts of which a token takes 2, at the width of a 134M model.
MIXTRAL_8X7B = GroupedMatmulShape(rows=4096, groups=8, inner=4096, outer=14336)
MOE_134M_DECODE = GroupedMatmulShape(rows=2, groups=8, inner=768, outer=2048)

# The most rows of a block: fewer waste less at the end of a group, more read a matrix less often.
# On a CPU, 64 to 256 train about equally fast at the QUICK shape.
MAX_BLOCK = {"cpu": 128, "gpu": 512, "tpu": 512}

# The least, where there are that many rows. On a CPU, XLA multiplies one row of float32 with a
# matrix at the bandwidth of memory, but a few rows at less than half of it, so a decode step takes
# rows one by one, though a group with several rows is then read once for each. In bfloat16 it is
# the other way round: one row takes two to four times as long as eight.
MIN_BLOCK_CPU_FLOAT32 = 1
MIN_BLOCK = 8


def block_rows(rows: int, groups: int, dtype: jnp.dtype) -> int:
    """Rows of a block: about the mean size of a group, a power of two, never more than `rows`."""
    platform = target_platform()
    block = MIN_BLOCK_CPU_FLOAT32 if (platform, dtype) == ("cpu", jnp.float32) else MIN_BLOCK
    while block * groups < rows and block < MAX_BLOCK[platform]:
        block *= 2
    return min(rows, block)


# `pallas_tpu`: rows of a tile and the unit of a shorter one (a tile of bfloat16); the unit of a
# matrix's sides; columns and bytes of the block of a matrix that is held at a time. In float32 the
# compiler adds three copies in bfloat16 to it, and all has to fit into 16 MiB.
TPU_ROWS = 128
TPU_SHORTEST = 16
TPU_LANES = 128
TPU_WIDTH = 512
TPU_BLOCK_BYTES = 2 * 2**20

# `pallas_mosaic_gpu`: pairs of blocks under way at a time (24 KiB each); the most groups, for each
# of which there is a branch.
GPU_SLOTS = 4
GPU_MAX_GROUPS = 64
