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

# `xla` on a CPU: bytes of float32 scores up to which all queries are scored together; bytes that
# are scored together beyond that (they should stay in a core's own cache); the unit of queries.
CPU_SCORES_MAX = 16 * 2**20
CPU_SCORES_AT_ONCE = 2**20
CPU_QUERIES_UNIT = 16
