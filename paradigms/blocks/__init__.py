"""Blocks: how a layer's mixer and MLP are wired. One file each; the registry lists them."""
