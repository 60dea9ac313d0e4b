"""One file for each architecture: its config keys and its tensors, both ways."""
