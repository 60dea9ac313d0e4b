"""SSD in plain JAX: the matrix form chunk by chunk, and the recurrence. Arithmetic is float32.

Heads are split as [G R], R = N/G heads sharing one group's B and C.
"""

import einops
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..compat import target_platform
from .decays import LOWEST_LOG, exact_part
from .shapes import CHUNK


def einsum(spec: str, *operands: Array) -> Array:
    """`jnp.einsum` in full float32 on every device."""
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)


def run_sequential(x, dt, A, B, C, *, D, state, reset, chunk=None):
    """Runs one step at a time; a single step (decode) is computed directly, without a loop.

    Autodiff stores every step's states (B T N P M): inference. Arguments and results as in
    `reference.run`; `chunk` is not used, a recurrence has no chunks.
    """
    del chunk
    per_group = x.shape[2] // B.shape[2]
    x32, dt32, A32, B32, C32 = (v.astype(jnp.float32) for v in (x, dt, A, B, C))

    def step(h, at_t):
        x, dt, B, C, reset = at_t
        if reset is not None:
            h = jnp.where(reset[:, None, None, None], 0.0, h)
        B, C = (jnp.repeat(v, per_group, axis=1) for v in (B, C))
        u = dt[..., None] * x
        h = jnp.exp(dt * A32)[..., None, None] * h + u[..., None] * B[:, :, None, :]
        return h, einsum("bnpm,bnm->bnp", h, C)

    if x.shape[1] == 1:
        state, y = step(
            state, tuple(None if v is None else v[:, 0] for v in (x32, dt32, B32, C32, reset))
        )
        y = y[:, None]
    else:
        major = (None if v is None else jnp.moveaxis(v, 1, 0) for v in (x32, dt32, B32, C32, reset))
        state, y = lax.scan(step, state, tuple(major))
        y = jnp.moveaxis(y, 0, 1)
    return skip(y, x32, D).astype(x.dtype), state


def run_chunked(x, dt, A, B, C, *, D, state, reset, chunk=None):
    """Runs the block decomposition of arXiv 2405.21060, section 6, one chunk after the other.

    Inside a chunk y = (L o (C B^T)) (dt x) plus what the state at the chunk's border contributes.
    Each chunk is rematerialised in the backward pass, so only the states at the borders and the
    inputs are stored. Arguments and results as in `reference.run`.
    """
    batch, length, heads, channels = x.shape
    groups, states = B.shape[2:]
    chunk = min(CHUNK.get(target_platform(), 64) if chunk is None else chunk, length)

    def split(v):
        """[B T ...] -> [T/C B C ...], filled up with steps that leave the state as it is."""
        rest = -length % chunk
        if rest:
            v = jnp.pad(v, ((0, 0), (0, rest)) + ((0, 0),) * (v.ndim - 2))
        return jnp.moveaxis(v.reshape(batch, -1, chunk, *v.shape[2:]), 1, 0)

    def by_head(v):
        """[T/C B C N ...] -> [T/C B G R C ...]."""
        return jnp.moveaxis(v.reshape(*v.shape[:3], groups, -1, *v.shape[4:]), 2, 4)

    def one_chunk(h, at_chunk):
        x, dt, B, C, reset = at_chunk
        x, dt, B, C = (v.astype(jnp.float32) for v in (x, dt, B, C))
        decay, from_start, to_end = _decays(dt * A32, reset)
        u = dt[..., None] * x
        scores = einsum("btgm,bsgm->bgts", C, B)
        y = einsum("bgrts,bgrsp->bgrtp", scores[:, :, None] * decay, u)
        y = y + einsum("btgm,bgrpm->bgrtp", C, h) * from_start[..., None]
        added = einsum("bgrsp,bsgm->bgrpm", u * to_end[..., None], B)
        return from_start[..., -1, None, None] * h + added, y

    A32 = A.astype(jnp.float32).reshape(groups, -1, 1)
    h = state.reshape(batch, groups, heads // groups, channels, states)
    resets = None if reset is None else split(reset)
    steps = (by_head(split(x)), by_head(split(dt)), split(B), split(C), resets)
    if length <= chunk:
        h, y = one_chunk(h, jax.tree.map(lambda v: v[0], steps))
        y = y[None]
    else:
        h, y = lax.scan(jax.checkpoint(one_chunk, prevent_cse=False), h, steps)
    y = einops.rearrange(y, "z b g r t p -> b (z t) (g r) p")[:, :length]
    return skip(y, x.astype(jnp.float32), D).astype(x.dtype), h.reshape(state.shape)


def skip(y, x32, D):
    """Adds D x."""
    return y if D is None else y + D.astype(jnp.float32)[:, None] * x32


def _decays(
    logs: Float[Array, "B G R C"], reset: Bool[Array, "B C"] | None
) -> tuple[Float[Array, "B G R C C"], Float[Array, "B G R C"], Float[Array, "B G R C"]]:
    """Decay factors between the steps of a chunk.

    Returns:
        The factor from step s to t (row t, column s; 0 for s > t), from the state before the chunk
        to step t, and from step s to the chunk's last step; all 0 across a reset.
    """
    chunk = logs.shape[-1]
    logs = jnp.maximum(logs, LOWEST_LOG)
    log_decay = _sums_between(logs)
    log_start = jnp.cumsum(logs, axis=-1)
    later = jnp.flip(jnp.cumsum(jnp.flip(logs[..., 1:], -1), axis=-1), -1)
    log_end = jnp.pad(later, ((0, 0),) * (logs.ndim - 1) + ((0, 1),))
    visible = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_))
    if reset is not None:
        document = jnp.cumsum(reset, axis=-1)
        visible = visible & (document[:, :, None] == document[:, None, :])[:, None, None]
        log_start = jnp.where((document == 0)[:, None, None], log_start, -jnp.inf)
        log_end = jnp.where((document == document[:, -1:])[:, None, None], log_end, -jnp.inf)
    decay = jnp.exp(jnp.where(visible, log_decay, -jnp.inf))
    return decay, jnp.exp(log_start), jnp.exp(log_end)


@jax.custom_vjp
def _sums_between(logs: Float[Array, "*batch C"]) -> Float[Array, "*batch C C"]:
    """Returns the sum of logs s + 1 .. t at row t, column s, for s <= t (elsewhere anything).

    Each log is split into a part whose sums and differences are exact, and a small rest.
    """
    coarse = exact_part(logs)
    coarse_sum, rest_sum = jnp.cumsum(coarse, axis=-1), jnp.cumsum(logs - coarse, axis=-1)

    def difference(sums):
        return sums[..., :, None] - sums[..., None, :]

    return difference(coarse_sum) + difference(rest_sum)


def _sums_between_forward(logs):
    return _sums_between(logs), None


def _sums_between_backward(_, cotangent):
    """The cotangent of log r: the sum over all pairs s < r <= t.

    The transpose of the forward differences would sum rows minus columns, in which pairs that do
    not cross r cancel only up to rounding; a strong decay at r multiplies what they leave.
    """
    chunk = cotangent.shape[-1]
    from_row = jnp.tril(jnp.ones((chunk, chunk), jnp.float32))  # [t, r]: t >= r
    crossing = einsum("...ts,tr->...rs", cotangent, from_row)
    strictly_before = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_), -1)
    return (jnp.sum(jnp.where(strictly_before, crossing, 0.0), axis=-1),)


_sums_between.defvjp(_sums_between_forward, _sums_between_backward)
