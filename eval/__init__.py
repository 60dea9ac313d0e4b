"""Measurement: likelihood, sample quality, latency, and the report that compares entries."""
