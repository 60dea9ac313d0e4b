"""Mamba mixer: a selective state space (S6) with one decay per channel and state."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator

from ...kernels.causal_conv1d import causal_conv1d, causal_conv1d_tree
from ...kernels.selective_scan import selective_scan, selective_scan_tree
from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.linear import linear, product, split_columns
from ..layers.norm import RMSNorm
from ..layers.params import Build, Float32Param, shape_of
from .state_space import (
    along,
    conv_kernel,
    conv_of_begin,
    known_state,
    last_of,
    refuse_lookahead,
    silu_like,
    since_reset,
    step_bias,
)


class MambaConfig(Config):
    """Mamba (S6) as a layer's mixer; the defaults are the paper's.

    Attributes:
        state_size: M.
        conv_width: W, taps of the causal convolution.
        expand: E / D.
        dt_rank: R, rank of the step size's projection; null means ceil(D / 16).
        dt_min: lowest step size at initialisation.
        dt_max: highest step size at initialisation.
        dt_floor: no step size begins below this.
        select_norms: RMS-normalise dt (before its second projection), B and C (Jamba, arXiv
            2403.19887, sec. 6.4).
    """

    name: Literal["mamba"] = "mamba"
    state_size: int = Field(default=16, ge=1)
    conv_width: int = Field(default=4, ge=1)
    expand: int = Field(default=2, ge=1)
    dt_rank: int | None = Field(default=None, ge=1)
    dt_min: float = Field(default=1e-3, gt=0.0)
    dt_max: float = Field(default=0.1, gt=0.0)
    dt_floor: float = Field(default=1e-4, gt=0.0)
    select_norms: bool = False

    @model_validator(mode="after")
    def _range_is_one(self) -> "MambaConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} is above dt_max={self.dt_max}")
        return self

    def build(self, build: Build) -> "Mamba":
        """Makes the mixer."""
        return Mamba(self, build)


class MambaState(NamedTuple):
    """All that a Mamba layer remembers; its size does not depend on the context.

    Attributes:
        conv: float32 (B W-1 E), the convolution's last inputs, oldest first.
        ssm: float32 (B E M).
    """

    conv: Float[Array, "B W-1 E"]
    ssm: Float[Array, "B E M"]


class MambaPending(NamedTuple):
    """Inputs of the recurrence for verified tokens: what `commit` needs to run it again.

    Attributes:
        conv_input: (B T E), before the convolution.
        x: (B T E), after it.
        dt: float32 (B T E).
        B: (B T M).
        starts_document: bool (B T).
        begin: what documents begin with, None for zeros.
    """

    conv_input: Float[Array, "B T E"]
    x: Float[Array, "B T E"]
    dt: Float[Array, "B T E"]
    B: Float[Array, "B T M"]
    starts_document: Bool[Array, "B T"]
    begin: MambaState | None = None


class Mamba(nnx.Module):
    """Selective state space (arXiv 2312.00752, figure 3 and algorithm 2).

    `x, z = u W_in`; `x = silu(conv(x))`; `dt, B, C` are projections of x, `dt` through a low rank
    and a softplus; `y = scan(x, dt, A, B, C) + D x`; the output is `(y * silu(z)) W_out`.
    """

    def __init__(self, config: MambaConfig, build: Build):
        """Draws the projections and sets decay rates to -1 ... -M."""
        width, inner = build.width, config.expand * build.width
        self.inner, self.state_size = inner, config.state_size
        self.conv_width = config.conv_width
        self.dt_rank = config.dt_rank or math.ceil(width / 16)
        self.w_in = build.matrix(width, 2 * inner)
        self.conv = conv_kernel(build, config.conv_width, inner)
        self.conv_bias = nnx.Param(jnp.zeros((inner,), jnp.float32))
        self.w_x = build.matrix(inner, self.dt_rank + 2 * config.state_size)
        bound = self.dt_rank**-0.5
        draw = jax.random.uniform(
            build.rngs.params(), (self.dt_rank, inner), jnp.float32, -bound, bound
        )
        self.w_dt = nnx.Param(draw)
        self.dt_bias = step_bias(build, (inner,), config.dt_min, config.dt_max, config.dt_floor)
        rates = jnp.arange(1, config.state_size + 1, dtype=jnp.float32)
        self.A_log = Float32Param(jnp.tile(jnp.log(rates), (inner, 1)))
        self.D = Float32Param(jnp.ones((inner,), jnp.float32))
        self.select_norms = config.select_norms
        if config.select_norms:
            self.dt_norm = RMSNorm(self.dt_rank, build.norm_eps)
            self.B_norm = RMSNorm(config.state_size, build.norm_eps)
            self.C_norm = RMSNorm(config.state_size, build.norm_eps)
        self.w_out = build.matrix(inner, width, residual=True)

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> MambaState:
        """Zeros. Float32 whatever `dtype` says: rounding errors of a recurrence pile up."""
        del max_len, dtype
        return MambaState(
            conv=jnp.zeros((batch, self.conv_width - 1, self.inner), jnp.float32),
            ssm=jnp.zeros((batch, self.inner, self.state_size), jnp.float32),
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: MambaState | None, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], MambaState | None]:
        """Runs the recurrence from the state (or from zeros) over the row's valid tokens."""
        # Without a state to hand on, padding can stay: it is behind the tokens that it could touch.
        lengths = None if state is None else ctx.lengths
        before = state if state is not None and ctx.history else MambaState(None, None)
        x, z = self._enter(x)
        y, after, _ = self._run(x, z, before, ctx, lengths)
        return self._leave(y), None if state is None else after

    def absorb(
        self, x: Float[Array, "1 M D"], ctx: LayerContext
    ) -> tuple[Float[Array, "1 M D"], MambaState]:
        """Runs over meta tokens; documents begin with the state after them."""
        return self(x, self.init_state(1, 0, dtype=x.dtype), ctx)

    def verify(
        self, x: Float[Array, "B T D"], state: MambaState, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], MambaPending]:
        """Runs the recurrence and keeps its inputs instead of its states."""
        conv_input, z = self._enter(x)
        reset, begin = ctx.starts_document, ctx.begin
        conv = known_state(state.conv, ctx.start)
        if ctx.parents is None:
            before = MambaState(conv, known_state(state.ssm, ctx.start))
            y, _, (x, dt, B) = self._run(conv_input, z, before, ctx, None)
        else:
            taps = self.conv[...]
            activation = "silu" if begin is None else None
            x = causal_conv1d_tree(
                conv_input, taps, self.conv_bias[...], ctx.parents, state=conv,
                activation=activation,
            )  # fmt: skip
            if begin is not None:
                extra = conv_of_begin(taps, begin.conv, ctx.positions)
                x = silu_like(x.astype(jnp.float32) + extra, z)
            dt, B, C = self._select(x)
            ssm = known_state(state.ssm, ctx.start, None if begin is None else begin.ssm)
            y = selective_scan_tree(
                x, dt, self._A(), B, C, ctx.parents, D=self.D[...], z=z, state=ssm
            )
        return self._leave(y), MambaPending(conv_input, x, dt, B, reset, begin)

    def commit(
        self,
        state: MambaState,
        pending: MambaPending,
        path: Int[Array, "B K"],
        accepted: Int[Array, " B"],
    ) -> MambaState:
        """Runs the recurrence alone again, over the accepted tokens of the path."""
        conv_input, x, dt, B, reset = (along(values, path) for values in pending[:-1])
        _, conv = causal_conv1d(
            conv_input, self.conv[...], None, state=state.conv, reset=reset, lengths=accepted
        )
        # What is read out is dropped, so that any C will do.
        _, ssm = selective_scan(
            x, dt, self._A(), B, B, state=state.ssm, reset=reset, lengths=accepted
        )
        if pending.begin is not None:
            ssm = self._with_begin(ssm, pending.begin, *since_reset(dt, reset), accepted)
        return MambaState(conv, ssm)

    def cost(self, batch: int, new_tokens: int, context: int, bytes_per_value: int) -> Cost:
        """Four projections, the convolution and seven operations per channel and state."""
        del bytes_per_value
        width, inner = shape_of(self.w_in)[0], self.inner
        selected = self.dt_rank + 2 * self.state_size
        projections = 2 * inner * (2 * width + selected + self.dt_rank + width)
        recurrence = inner * (2 * self.conv_width + 7 * self.state_size + 4)
        state_bytes = 4 * inner * (self.conv_width - 1 + self.state_size)
        return Cost(
            flops=float(batch * new_tokens * (projections + recurrence)),
            bytes_read=float(batch * state_bytes if context else 0),
            state_bytes_fixed=float(batch * state_bytes),
            state_bytes_per_token=0.0,
            mixing_flops=float(batch * new_tokens * recurrence),
            bytes_written=float(batch * state_bytes),
        )

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """Causal masks only."""
        del stateful
        return refuse_lookahead("mamba", ctx)

    def _enter(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        return split_columns(linear(x, self.w_in[...]), (self.inner, self.inner))

    def _run(
        self,
        x: Float[Array, "B T E"],
        z: Float[Array, "B T E"],
        before: MambaState,
        ctx: LayerContext,
        lengths: Int[Array, " B"] | None,
    ) -> tuple[Array, MambaState, tuple[Array, Array, Array]]:
        """Convolution, selection, scan and gate; returns y, the state after, and x, dt, B.

        Documents that begin with a state get its response added: the recurrence is linear in it.
        """
        reset, begin = ctx.starts_document, ctx.begin
        taps, A, D = self.conv[...], self._A(), self.D[...]
        activation = "silu" if begin is None else None
        x, conv = causal_conv1d(
            x, taps, self.conv_bias[...], state=before.conv, reset=reset, lengths=lengths,
            activation=activation,
        )  # fmt: skip
        if begin is not None:
            extra = conv_of_begin(taps, begin.conv, ctx.positions)
            x = silu_like(x.astype(jnp.float32) + extra, z)
        dt, B, C = self._select(x)
        gate = z if begin is None else None
        y, ssm = selective_scan(
            x, dt, A, B, C, D=D, z=gate, state=before.ssm, reset=reset, lengths=lengths
        )
        if begin is not None:
            total, started = since_reset(dt, reset)
            rest = jnp.exp(A * total[..., None]) * begin.ssm[:, None]
            response = jnp.einsum("btem,btm->bte", rest, C.astype(jnp.float32))
            y = y.astype(jnp.float32) + jnp.where(started[:, :, None], response, 0.0)
            y = (y * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
            if lengths is not None:
                ssm = self._with_begin(ssm, begin, total, started, lengths)
        return y, MambaState(conv, ssm), (x, dt, B)

    def _with_begin(
        self,
        ssm: Float[Array, "B E M"],
        begin: MambaState,
        total: Float[Array, "B T E"],
        started: Bool[Array, "B T"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B E M"]:
        """The state with what is left of `begin` in documents that began in this call."""
        rest = jnp.exp(self._A() * last_of(total, lengths)[..., None]) * begin.ssm
        took = (lengths > 0) & last_of(started, lengths)
        return ssm + jnp.where(took[:, None, None], rest, 0.0)

    def _select(self, x: Float[Array, "B T E"]) -> tuple[Array, Array, Array]:
        """Step sizes (float32), B and C of each token."""
        selected = linear(x, self.w_x[...])
        low, B, C = split_columns(selected, (self.dt_rank, self.state_size, self.state_size))
        if self.select_norms:
            low, B, C = self.dt_norm(low), self.B_norm(B), self.C_norm(C)
        dt = product(low.astype(x.dtype), self.w_dt[...], "rd,df->rf", jnp.float32)
        return jax.nn.softplus(dt + self.dt_bias[...]), B, C

    def _leave(self, y: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return linear(y, self.w_out[...])

    def _A(self) -> Float[Array, "E M"]:
        return -jnp.exp(self.A_log[...])
