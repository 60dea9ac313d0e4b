"""Decodings: how a trained model is run. The loop, the draws, and one file per decoding."""
