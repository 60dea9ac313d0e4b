"""Named shapes that tests and benchmarks share, and the kernels' sizes."""

from typing import NamedTuple


class PagedAttentionShape(NamedTuple):
    """B batch, T queries, S keys of each row, N query heads, K key/value heads, H head width.

    `block` is how many keys a block of the pool holds.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int


SHAPES = {
    "tiny": PagedAttentionShape(2, 2, 37, 4, 2, 64, 16),
    "134m_decode": PagedAttentionShape(1, 1, 1024, 12, 12, 64, 16),
    "7b_decode": PagedAttentionShape(4, 1, 4096, 32, 32, 128, 16),
    "8b_decode": PagedAttentionShape(8, 1, 8192, 32, 8, 128, 64),
    "8b_chunk": PagedAttentionShape(8, 16, 4096, 32, 8, 128, 32),
    "8b_long_decode": PagedAttentionShape(1, 1, 32768, 32, 8, 128, 128),
}

# `xla`: bytes of keys that are gathered at a time; they should stay in the last-level cache.
XLA_BYTES = 4 * 2**20

# `pallas_tpu`: key/value heads that are read together (the rows of a register), fewer that XLA lays
# out as the kernel reads them, and the unit of a head's width (its lanes); the most columns
# (keys times those heads) of a tile, unless one block alone has more, and blocks of the pool in it;
# the most scores that are made at a time, the unit of rows (a tile of bfloat16) and how many
# programs fill a chip; the most bytes of keys that a block of the pool may have and the most
# entries of the table (four copies of a block lie in vector memory, the table in scalar memory).
TPU_HEADS = 8
TPU_FEW_HEADS = (2, 4)
TPU_LANES = 128
TPU_COLUMNS = 1024
TPU_COPIES = 16
TPU_SCORES = 2**18
TPU_ROW_UNIT = 16
TPU_PROGRAMS = 2
TPU_BLOCK_BYTES = 2**21
TPU_TABLE_MAX = 2**16

# How many programs fill a GPU (an H100's cores).
GPU_PROGRAMS = 132

# `pallas_mosaic_gpu`: rows of a tile (fixed by wgmma) and keys, tiles that are being copied at a
# time, the unit of a head's width (a swizzle of 128 bytes) and the widest head, and the unit of a
# block's keys (the rows of a swizzle).
GPU_ROWS = 64
GPU_KEYS = 128
GPU_STAGES = 2
GPU_HEAD_UNIT = 64
GPU_HEAD_MAX = 128
GPU_BLOCK_UNIT = 8

# `pallas_triton`: the most rows and keys of a tile, the widest head, warps and pipeline stages.
TRITON_ROWS = 64
TRITON_KEYS = 64
TRITON_HEAD_MAX = 256
TRITON_WARPS = 4
TRITON_STAGES = 2
