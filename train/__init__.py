"""Configuration, data, the training loop and checkpoints."""
