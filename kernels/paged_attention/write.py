"""Writing new keys and values into the pool, through the block table."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ..compat import target_platform
from ..dispatch import KernelArgumentError, check_array

_OP = "paged_attention.write"


def write(
    k_pool: Float[Array, "pool block K H"],
    v_pool: Float[Array, "pool block K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    table: Int[Array, "B blocks"],
    offsets: Int[Array, " B"],
    counts: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "pool block K H"], Float[Array, "pool block K H"]]:
    """Returns the pools with new keys and values at their places; the given pools are donated.

    Token t of row b goes to position `offsets[b] + t`, which is slot `position % block` of the
    block `table[b, position // block]`. No token is moved to another place than its own: one whose
    position is negative or behind the table, or whose entry of the table names no block of the
    pool, is left out, and `paged_attention` answers NaN for a row that needs it. Tokens of two rows
    for one place leave either: copy a shared block before a row writes into it.

    Args:
        k_pool: pool of keys; not to be used again by the caller (inside `jax.jit` it may be, at the
            price of a copy).
        v_pool: pool of values, likewise.
        k: new keys, in the pool's dtype.
        v: new values, likewise.
        table: blocks of each row in order; entries that no token needs may be anything.
        offsets: position of each row's first new token.
        counts: how many of a row's tokens are real; the rest is left out. All T when None.

    Raises:
        KernelArgumentError: a shape or dtype does not fit.
    """
    check_array(_OP, "k_pool", k_pool, "pool block K H")
    check_array(_OP, "v_pool", v_pool, tuple(k_pool.shape))
    check_array(_OP, "k", k, "B T K H")
    batch, tokens = k.shape[:2]
    for name, new in (("k", k), ("v", v)):
        check_array(_OP, name, new, (batch, tokens, *k_pool.shape[2:]))
    for name, array in (("v_pool", v_pool), ("k", k), ("v", v)):
        if array.dtype != k_pool.dtype:
            raise KernelArgumentError(
                f"{_OP}: {name} has dtype {array.dtype}; want {k_pool.dtype}, that of k_pool"
            )
    check_array(_OP, "table", table, "B blocks", "integer")
    check_array(_OP, "table", table, (batch, table.shape[1]), "integer")
    check_array(_OP, "offsets", offsets, (batch,), "integer")
    if counts is None:
        counts = jnp.full((batch,), tokens, jnp.int32)
    check_array(_OP, "counts", counts, (batch,), "integer")
    numbers = (jnp.asarray(x).astype(jnp.int32) for x in (table, offsets, counts))
    return _write(jnp.asarray(k_pool), jnp.asarray(v_pool), k, v, *numbers)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _write(k_pool, v_pool, k, v, table, offsets, counts):
    pool, block = k_pool.shape[:2]
    if 0 in (*k_pool.shape, *k.shape, *table.shape):
        return k_pool, v_pool
    token = jnp.arange(k.shape[1], dtype=jnp.int32)
    position = offsets[:, None] + token
    column = position // block
    inside = (position >= 0) & (column < table.shape[1]) & (token < counts[:, None])
    entry = jnp.take_along_axis(table, jnp.where(inside, column, 0), axis=1)
    # An index behind the pool is dropped; a negative one would count from the pool's end.
    entry = jnp.where(inside & (entry >= 0), entry, pool)
    write_all = _one_by_one if target_platform() == "cpu" else _together
    return write_all((k_pool, v_pool), (k, v), entry, position % block)


def _together(pools, new, entry, slot):
    return tuple(
        pool.at[entry, slot].set(x, mode="drop") for pool, x in zip(pools, new, strict=True)
    )


def _one_by_one(pools, new, entry, slot):
    """XLA's CPU backend scatters so too, but bfloat16 by way of a float32 copy of the whole pool in
    some releases.
    """  # noqa: D205
    tokens = [x.reshape(-1, *x.shape[2:]) for x in new]
    entry, slot = entry.reshape(-1), slot.reshape(-1)
    kept = entry < pools[0].shape[0]
    first_kept = jnp.argsort(~kept, stable=True)

    def step(n, pools):
        n = first_kept[n]
        at = (entry[n], slot[n], 0, 0)
        return tuple(
            jax.lax.dynamic_update_slice(pool, x[n][None, None], at)
            for pool, x in zip(pools, tokens, strict=True)
        )

    return jax.lax.fori_loop(0, jnp.sum(kept), step, pools)
