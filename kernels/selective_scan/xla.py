"""The selective scan in plain JAX: three forms, none of which needs a custom kernel.

All keep E as the last, contiguous axis ([B M E] states): it is the axis that vectorises, and the
sum over M is then a sum of rows. Arithmetic is float32.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .shapes import ASSOCIATIVE_BYTES_MAX, CHUNK


def run_sequential(x, dt, A, B, C, *, D, z, state, reset):
    """Runs one step at a time; a single step (decode) is computed directly, without a loop.

    Autodiff stores every step's states (B T M E): short sequences and inference. Arguments and
    results as in `reference.run`.
    """
    x32, dt32, A32, B32, C32 = _float32(x, dt, A, B, C)
    if x.shape[1] == 1:
        y, final = _one_step(x32, dt32, A32, B32, C32, state, reset)
        return finish(y, x32, D, z, x.dtype), final
    y, final = _over_time(_scan_plain, x32, dt32, A32, B32, C32, state, reset)
    return finish(y, x32, D, z, x.dtype), final


def run_associative(x, dt, A, B, C, *, D, z, state, reset):
    """Runs `lax.associative_scan` over all of T at once: O(log T) deep, holds B T M E twice.

    Arguments and results as in `reference.run`.
    """
    x32, dt32, A32, B32, C32 = _float32(x, dt, A, B, C)
    y, final = _over_time(_scan_associative, x32, dt32, A32, B32, C32, state, reset)
    return finish(y, x32, D, z, x.dtype), final


def supports_associative(x, dt, A, B, C, **_) -> str | None:
    """Refuses sizes whose materialised states would fill the memory."""
    size = 2 * 4 * x.shape[0] * x.shape[1] * A.shape[0] * A.shape[1]
    if size > ASSOCIATIVE_BYTES_MAX:
        return f"it would hold {size / 2**30:.1f} GiB of states; use xla_chunked"
    return None


def run_chunked(x, dt, A, B, C, *, D, z, state, reset):
    """Runs chunk by chunk with a hand-written backward pass (the fastest form to train on a CPU).

    Forward stores the states at chunk borders only. Backward visits the chunks in reverse, reruns
    each from its border and sweeps it backwards, so no more than one chunk of states exists at any
    time. Reverse-mode differentiable once. Arguments and results as in `reference.run`.
    """
    x32, dt32, A32, B32, C32 = _float32(x, dt, A, B, C)
    scan = functools.partial(_scan_chunked, min(CHUNK, x.shape[1]))
    y, final = _over_time(scan, x32, dt32, A32, B32, C32, state, reset)
    return finish(y, x32, D, z, x.dtype), final


def _float32(*arrays):
    return tuple(v.astype(jnp.float32) for v in arrays)


def finish(y, x32, D, z, dtype):
    """Adds the skip and applies the gate."""
    if D is not None:
        y = y + D.astype(jnp.float32) * x32
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(dtype)


def _one_step(x, dt, A, B, C, state, reset):
    """Advances by T = 1 in the state's own layout."""
    if reset is not None:
        state = jnp.where(reset[:, 0, None, None], 0.0, state)
    u = dt * x
    h = jnp.exp(dt[:, 0, :, None] * A) * state + u[:, 0, :, None] * B[:, 0, None, :]
    return jnp.sum(h * C[:, 0, None, :], axis=-1)[:, None, :], h


def _over_time(scan, x, dt, A, B, C, state, reset):
    """Calls `scan` on time-major inputs with states [B M E] and turns its results back."""
    major = (jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C))
    reset = None if reset is None else reset.T
    x, dt, B, C = major
    y, final = scan(x, dt, A.T, B, C, jnp.swapaxes(state, 1, 2), reset)
    return jnp.moveaxis(y, 0, 1), jnp.swapaxes(final, 1, 2)


def _enter(h: Float[Array, "B M E"], reset: Bool[Array, " B"] | None) -> Float[Array, "B M E"]:
    """The state as a step finds it (or the cotangent as it leaves): zero where reset."""
    return h if reset is None else jnp.where(reset[:, None, None], 0.0, h)


def _sum_states(v: Float[Array, "B M E"]) -> Float[Array, "B E"]:
    """Sums over M; at B = 1 by additions, as XLA's reduction was 6 times slower there (CPU)."""
    if v.shape[0] == 1:
        return functools.reduce(operator.add, (v[:, m] for m in range(v.shape[1])))
    return jnp.sum(v, axis=1)


def _sum_channels(v: Float[Array, "B M E"], w: Float[Array, "B E"]) -> Float[Array, "B M"]:
    return jnp.einsum("bme,be->bm", v, w, precision=lax.Precision.HIGHEST)


def _next_state(h, at_t, At):
    """h_t from h_{t-1}; at_t = (dt [B E], dt x [B E], B [B M], reset)."""
    dt, u, B, reset = at_t
    return jnp.exp(dt[:, None, :] * At) * _enter(h, reset) + u[:, None, :] * B[:, :, None]


def _scan_plain(x, dt, At, B, C, state, reset):
    """One loop over time; returns y [T B E] and the final state [B M E]."""

    def step(h, at_t):
        x, dt, B, C, reset = at_t
        h = _next_state(h, (dt, dt * x, B, reset), At)
        return h, _sum_states(h * C[:, :, None])

    final, y = lax.scan(step, state, (x, dt, B, C, reset))
    return y, final


def _scan_associative(x, dt, At, B, C, state, reset):
    decay = jnp.exp(dt[:, :, None, :] * At)
    if reset is not None:
        decay = jnp.where(reset[:, :, None, None], 0.0, decay)
    added = (dt * x)[:, :, None, :] * B[..., None]
    added = added.at[0].add(decay[0] * state)

    def join(early, late):
        return late[0] * early[0], late[0] * early[1] + late[1]

    _, h = lax.associative_scan(join, (decay, added))
    return jnp.sum(h * C[..., None], axis=2), h[-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_chunked(chunk, x, dt, At, B, C, state, reset):
    return _scan_chunked_forward(chunk, x, dt, At, B, C, state, reset)[0]


def _chunks(chunk, *arrays):
    """[T ...] -> [T/C C ...], with steps of zeros (the identity on the state) to fill the last."""

    def split(v):
        if v is None:
            return None
        rest = -v.shape[0] % chunk
        v = jnp.pad(v, ((0, rest),) + ((0, 0),) * (v.ndim - 1)) if rest else v
        return v.reshape(-1, chunk, *v.shape[1:])

    return tuple(split(v) for v in arrays)


def _unchunk(v, length):
    return v.reshape(-1, *v.shape[2:])[:length]


def _scan_chunked_forward(chunk, x, dt, At, B, C, state, reset):
    def one_chunk(h, at_chunk):
        x, dt, B, C, reset = at_chunk
        y, last = _scan_plain(x, dt, At, B, C, h, reset)
        return last, (y, h)

    final, (y, borders) = lax.scan(one_chunk, state, _chunks(chunk, x, dt, B, C, reset))
    return (_unchunk(y, x.shape[0]), final), (x, dt, At, B, C, reset, borders)


def _scan_chunked_backward(chunk, residuals, cotangents):
    """The adjoint of h_t = a_t h_{t-1} + u_t B_t and y_t = sum_M C_t h_t (a = exp(dt A), u = dt x).

    With g_t the cotangent of h_t: g_t = C_t dy_t + (a g)_{t+1}; dC_t = sum_E h_t dy_t;
    dB_t = sum_E g_t u_t; du_t = sum_M g_t B_t; the exponent's cotangent is q_t = g_t a_t h_{t-1},
    so d(dt)_t = sum_M q_t A and dA = sum_{B, t} q_t dt_t.
    """
    x, dt, At, B, C, reset, borders = residuals
    dy, dfinal = cotangents
    length = x.shape[0]

    def one_chunk(carry, at_chunk):
        (x, dt, B, C, dy, reset), border = at_chunk
        u = dt * x
        dh, dA = carry

        def again(h, at_t):
            return _next_state(h, at_t, At), h

        last, before = lax.scan(again, border, (dt, u, B, reset))

        def sweep(carry, at_t):
            dh, dA, after = carry
            dt, u, B, C, dy, reset, before = at_t
            g = dh + C[:, :, None] * dy[:, None, :]
            ga = g * jnp.exp(dt[:, None, :] * At)
            q = ga * _enter(before, reset)
            out = (
                _sum_states(g * B[:, :, None]),
                _sum_states(q * At),
                _sum_channels(g, u),
                _sum_channels(after, dy),
            )
            return (_enter(ga, reset), dA + q * dt[:, None, :], before), out

        (dh, dA, _), (du, ddt, dB, dC) = lax.scan(
            sweep, (dh, dA, last), (dt, u, B, C, dy, reset, before), reverse=True
        )
        return (dh, dA), (du * dt, ddt + du * x, dB, dC)

    steps = _chunks(chunk, x, dt, B, C, dy, reset)
    (dstate, dA), outs = lax.scan(
        one_chunk, (dfinal, jnp.zeros_like(dfinal)), (steps, borders), reverse=True
    )
    dx, ddt, dB, dC = (_unchunk(v, length) for v in outs)
    return dx, ddt, jnp.sum(dA, axis=0), dB, dC, dstate, None


_scan_chunked.defvjp(_scan_chunked_forward, _scan_chunked_backward)
