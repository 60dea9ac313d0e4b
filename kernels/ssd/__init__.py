"""Mamba-2's state-space duality (SSD)."""

from .api import IMPLEMENTATIONS, ssd, ssd_tree

__all__ = ["IMPLEMENTATIONS", "ssd", "ssd_tree"]
