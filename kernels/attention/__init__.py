"""Softmax attention under one mask rule."""

from .api import attention, merge_attention
from .mask import AttentionMask

__all__ = ["AttentionMask", "attention", "merge_attention"]
