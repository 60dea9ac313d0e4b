"""Checkpoints of other projects, in and out."""
