"""Named shapes for tests and benchmarks, and how large a block of logits may be."""

from typing import NamedTuple


class CrossEntropyShape(NamedTuple):
    """Sizes of one call: tokens, width D, vocabulary V."""

    tokens: int
    width: int
    vocab: int


TINY = CrossEntropyShape(tokens=13, width=8, vocab=37)
QUICK = CrossEntropyShape(tokens=1024, width=128, vocab=512)
TRANSFORMER_134M = CrossEntropyShape(tokens=512, width=768, vocab=32000)
LLAMA_8B = CrossEntropyShape(tokens=4096, width=4096, vocab=128256)

# Bytes of float32 logits that may exist at once. Larger blocks add to the weight's gradient less
# often, which costs reading and writing all of it.
BLOCK_BYTES = {"cpu": 64 * 2**20, "gpu": 256 * 2**20, "tpu": 256 * 2**20}


def block_tokens(tokens: int, vocab: int, platform: str) -> int:
    """Tokens per block: blocks of equal size whose logits stay within `BLOCK_BYTES`."""
    most = max(BLOCK_BYTES[platform] // (4 * vocab), 1)
    blocks = -(-tokens // most)
    return -(-tokens // max(blocks, 1))
