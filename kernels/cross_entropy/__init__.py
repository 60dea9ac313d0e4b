"""Cross-entropy over a large vocabulary."""

from .api import IMPLEMENTATIONS, cross_entropy, weighted_cross_entropy

__all__ = ["IMPLEMENTATIONS", "cross_entropy", "weighted_cross_entropy"]
