"""The letters of every shape in genlab, and array types that carry them.

B batch, T query (new-token) time, S key time, L canvas length, D width, F mlp width, V vocabulary;
N query heads, K key/value heads, G = N / K, H head width; E inner width, M state size, P channels
per SSM head, W conv width, C chunk.
"""

from jax import Array
from jaxtyping import Bool, Float, Int

Tokens = Int[Array, "B T"]
Hidden = Float[Array, "B T D"]
Logits = Float[Array, "B T V"]
RowInts = Int[Array, " B"]
RowBools = Bool[Array, " B"]
TokenBools = Bool[Array, "B T"]
TokenInts = Int[Array, "B T"]

__all__ = ["Hidden", "Logits", "RowBools", "RowInts", "TokenBools", "TokenInts", "Tokens"]
