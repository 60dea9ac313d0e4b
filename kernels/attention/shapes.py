"""Named shapes that tests and benchmarks share."""

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """B batch, T queries, S keys, N query heads, K key/value heads, H head width."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "tiny": AttentionShape(2, 7, 7, 4, 2, 8),
    "quick": AttentionShape(16, 256, 256, 4, 2, 32),
    "134m_train": AttentionShape(2, 256, 256, 12, 12, 64),
    "134m_prefill": AttentionShape(1, 512, 512, 12, 12, 64),
    "134m_decode": AttentionShape(1, 1, 1024, 12, 12, 64),
    "7b_prefill": AttentionShape(1, 4096, 4096, 32, 32, 128),
    "8b_decode": AttentionShape(8, 1, 8192, 32, 8, 128),
}

# `pallas_tpu`: the most rows (queries times G) and keys of a block, the unit of rows (a tile of
# bfloat16), of keys and of a head's width (whole lanes of a register), and how many programs fill
# a chip: when few rows look at many keys, the keys are cut to get as many.
TPU_ROWS = 512
TPU_KEYS = 512
TPU_ROW_UNIT = 16
TPU_LANES = 128
TPU_PROGRAMS = 2

# `xla`: from so many queries on, heads are turned outwards.
MANY_QUERIES = 16

# `xla` on a CPU: up to so many rows (queries times heads) all heads share one product.
CPU_JOINED_ROWS = 48

# `xla` on a CPU in bfloat16: from so many keys on, that product over values sums them in pieces.
CPU_LONG_KEYS = 8192
CPU_KEY_PIECES = 16

# `xla` on a CPU: bytes of float32 scores up to which all queries are scored together; bytes that
# are scored together beyond that (they should stay in the last-level cache); the unit of queries.
CPU_SCORES_MAX = 16 * 2**20
CPU_SCORES_AT_ONCE = 12 * 2**20
CPU_QUERIES_UNIT = 16

# `pallas_mosaic_gpu`: rows of a warpgroup (fixed by wgmma), how many of them compute, keys of a
# block forward and backward, blocks that are being copied at a time, the unit of a head's width (a
# swizzle of 128 bytes) and the widest head, and how many programs fill a chip (an H100's cores).
GPU_ROWS = 64
GPU_WARPGROUPS = 2
GPU_KEYS = 128
GPU_BACKWARD_KEYS = 64
GPU_STAGES = 2
GPU_HEAD_UNIT = 64
GPU_HEAD_MAX = 128
GPU_PROGRAMS = 132

# `pallas_triton`: the most rows and keys of a block, the fewest of either and the narrowest head
# (what a matrix product takes), the widest head, warps and pipeline stages.
TRITON_ROWS = 64
TRITON_KEYS = 64
TRITON_LEAST = 16
TRITON_HEAD_MAX = 128
TRITON_WARPS = 4
TRITON_STAGES = 2

# The widest head that cuDNN takes on every card.
CUDNN_HEAD_MAX = 128
