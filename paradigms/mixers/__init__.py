"""Mixers: how a layer mixes time. One file each; the registry lists them."""
