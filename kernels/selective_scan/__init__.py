"""Mamba's selective scan (S6)."""

from .api import IMPLEMENTATIONS, selective_scan, selective_scan_tree

__all__ = ["IMPLEMENTATIONS", "selective_scan", "selective_scan_tree"]
