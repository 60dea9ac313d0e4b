"""Small parts that mixers and blocks share: parameters, norms, rotary phases, dropout."""
