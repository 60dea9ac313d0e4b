"""The one layout that the scan's GPU kernels share: whole blocks, and everything small float32."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class Padded(NamedTuple):
    """Arguments of a scan, filled up to whole blocks.

    A step of zeros leaves the state as it is; channels and state dimensions of zeros stay zero.
    """

    x: Array  # B T E
    dt: Array  # B T E
    z: Array | None  # B T E
    At: Array  # M E, float32, as is all that follows
    B: Array  # B T M
    C: Array  # B T M
    D: Array | None  # E
    keep: Array | None  # B T; 0 where a document begins
    state: Array  # B M E


class PaddedGradients(NamedTuple):
    """Cotangents of `Padded` in its shapes and dtypes, but for the first axes of some.

    Those are summed away: the axis of rows of At and D, that of blocks of channels of B and C.
    """

    x: Array
    dt: Array
    z: Array | None
    At: Array  # rows M E
    B: Array  # blocks B T M
    C: Array  # blocks B T M
    D: Array | None  # rows E
    state: Array

    def summed(self, inputs: Padded) -> Padded:
        """The cotangents of `inputs`."""
        return Padded(
            x=self.x,
            dt=self.dt,
            z=self.z,
            At=jnp.sum(self.At, axis=0),
            B=jnp.sum(self.B, axis=0),
            C=jnp.sum(self.C, axis=0),
            D=None if self.D is None else jnp.sum(self.D, axis=0),
            keep=None if inputs.keep is None else jnp.zeros_like(inputs.keep),
            state=self.state,
        )


def pad(x, dt, A, B, C, *, D, z, state, reset, steps: int, channels: int, states: int) -> Padded:
    """Fills T, E and M up to multiples of `steps`, `channels` and `states`."""
    more = {
        "T": -x.shape[1] % steps,
        "E": -x.shape[2] % channels,
        "M": -A.shape[1] % states,
        "B": 0,
    }

    def fill(v, axes, dtype=jnp.float32):
        if v is None:
            return None
        v = v if dtype is None else v.astype(dtype)
        widths = [(0, more[axis]) for axis in axes]
        return jnp.pad(v, widths) if any(after for _, after in widths) else v

    return Padded(
        x=fill(x, "BTE", None),
        dt=fill(dt, "BTE", None),
        z=fill(z, "BTE", None),
        At=fill(A.T, "ME"),
        B=fill(B, "BTM"),
        C=fill(C, "BTM"),
        D=fill(D, "E"),
        keep=None if reset is None else 1.0 - fill(reset, "BT"),
        state=fill(jnp.swapaxes(state, 1, 2), "BME"),
    )


def unpad(y: Array, final: Array, x: Array, states: int) -> tuple[Array, Array]:
    """Cuts the results of a padded scan of x back: y [B T E] and the final state [B E M]."""
    length, inner = x.shape[1:]
    return y[:, :length, :inner], jnp.swapaxes(final[:, :states, :inner], 1, 2)
