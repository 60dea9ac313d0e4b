"""Depthwise causal convolution with a carried window."""

from .api import IMPLEMENTATIONS, causal_conv1d, causal_conv1d_tree

__all__ = ["IMPLEMENTATIONS", "causal_conv1d", "causal_conv1d_tree"]
