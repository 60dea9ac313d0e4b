"""Which tokens masked diffusion hides: noise levels and masks, all drawn on the device from a key.

A row's mask depends on the key, the row's number and the tokens' places in it, never on how long
the row is padded or what stands in the other rows.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key, UInt32

# Levels are drawn from [T_MIN, 1): a level of 0 has weight 1/0. The value of MDLM and LLaDA.
T_MIN = 1e-3


def noise_levels(
    key: Key[Array, ""], batch: int, *, low_discrepancy: bool
) -> Float[Array, " B"]:
    """Draws the share t of tokens to hide in each row, uniform in [T_MIN, 1).

    Args:
        key: PRNG key.
        batch: B.
        low_discrepancy: spread the rows' levels evenly, `t_b = (u + b/B) mod 1` with one u for all
            (Variational Diffusion Models, arXiv 2107.00630, appendix I.1; used by MDLM). Each
            row's level stays uniform, so the loss stays unbiased; False draws them independently.

    Returns:
        float32 (B).
    """
    if low_discrepancy:
        u = jax.random.uniform(key, (), jnp.float32)
        u = (u + jnp.arange(batch, dtype=jnp.float32) / batch) % 1.0
    else:
        rows = jnp.arange(batch)
        u = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row)))(rows)
    return T_MIN + (1.0 - T_MIN) * u


def random_bits(key: Key[Array, ""], shape: tuple[int, int]) -> UInt32[Array, "B T"]:
    """Draws 32 bits for each place (row, position): a function of key and place alone."""
    rows, places = jnp.arange(shape[0]), jnp.arange(shape[1])

    def one(row: Array, place: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, row), place))

    return jax.vmap(lambda row: jax.vmap(lambda place: one(row, place))(places))(rows)


def mask_with_probability(
    key: Key[Array, ""], maskable: Bool[Array, "B T"], t: Float[Array, " B"]
) -> Bool[Array, "B T"]:
    """Hides each maskable token with probability t, independently (MDLM, linear schedule)."""
    u = random_bits(key, maskable.shape).astype(jnp.float32) * 2.0**-32
    return maskable & (u < t[:, None])


def mask_exactly(
    key: Key[Array, ""], maskable: Bool[Array, "B T"], count: Int[Array, " B"]
) -> Bool[Array, "B T"]:
    """Hides exactly `count` of a row's maskable tokens, every such set equally likely."""
    # Half the range, so that every maskable token is ranked before all the others.
    order = jnp.where(maskable, random_bits(key, maskable.shape) >> 1, jnp.uint32(2**32 - 1))
    rank = jnp.argsort(jnp.argsort(order, axis=1, stable=True), axis=1)
    return maskable & (rank < count[:, None])
