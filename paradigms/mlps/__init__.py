"""MLP kinds: what a layer does to each position on its own."""
