"""Rows of several groups, each times its group's matrix: the matmul of a mixture of experts."""

from .api import IMPLEMENTATIONS, grouped_matmul

__all__ = ["IMPLEMENTATIONS", "grouped_matmul"]
