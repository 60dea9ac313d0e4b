"""Compute primitives: one folder per op, each with an equation-level reference."""
