"""Softmax attention over keys and values that lie in a pool of blocks, and writing into it."""

from .api import paged_attention
from .write import write

__all__ = ["paged_attention", "write"]
