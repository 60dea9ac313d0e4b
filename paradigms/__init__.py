"""Ways of generating text: mixers, blocks, backbones, paradigms and decodings."""
