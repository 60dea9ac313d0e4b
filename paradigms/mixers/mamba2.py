"""Mamba-2 mixer: a state space with one decay per head (SSD), computed by matrix products."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator

from ...kernels.causal_conv1d import causal_conv1d, causal_conv1d_tree
from ...kernels.ssd import ssd, ssd_tree
from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.linear import linear, split_columns
from ..layers.norm import rms_norm
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


class Mamba2Config(Config):
    """Mamba-2 (SSD) as a layer's mixer.

    Attributes:
        state_size: M.
        head_dim: P, channels per head; divides expand * D.
        expand: E / D.
        inner_width: E itself, where it is no multiple of D; null for expand * D.
        num_groups: heads of a group share B and C; divides the number of heads.
        conv_width: W, taps of the causal convolution.
        dt_min: lowest step size at initialisation.
        dt_max: highest step size at initialisation.
        dt_floor: no step size begins below this.
        multipliers: factors on z, X, B, C and dt as they are projected (Falcon-H1, arXiv
            2507.22448).
        gate_norm: normalise what was gated; false for the gate alone (Falcon-H1).
        min_step: no step size ever falls below this (Zamba2's programs); 0 sets no limit.
        a_init_range: decay rates per head begin log-uniform between these.
    """

    name: Literal["mamba2"] = "mamba2"
    state_size: int = Field(default=64, ge=1)
    head_dim: int = Field(default=64, ge=1)
    expand: int = Field(default=2, ge=1)
    inner_width: int | None = Field(default=None, ge=1)
    num_groups: int = Field(default=1, ge=1)
    conv_width: int = Field(default=4, ge=1)
    dt_min: float = Field(default=1e-3, gt=0.0)
    dt_max: float = Field(default=0.1, gt=0.0)
    dt_floor: float = Field(default=1e-4, gt=0.0)
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    gate_norm: bool = True
    min_step: float = Field(default=0.0, ge=0.0)
    a_init_range: tuple[float, float] = (1.0, 16.0)

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> "Mamba2Config":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} is above dt_max={self.dt_max}")
        low, high = self.a_init_range
        if not 0 < low <= high:
            raise ValueError(f"a_init_range={[low, high]}: want 0 < low <= high")
        return self

    def build(self, build: Build) -> "Mamba2":
        """Makes the mixer."""
        return Mamba2(self, build)


class Mamba2State(NamedTuple):
    """All that a Mamba-2 layer remembers; its size does not depend on the context.

    Attributes:
        conv: float32 (B W-1 E+2GM), the convolution's last inputs, oldest first.
        ssm: float32 (B N P M).
    """

    conv: Float[Array, "B W-1 E+2GM"]
    ssm: Float[Array, "B N P M"]


class Mamba2Pending(NamedTuple):
    """Inputs of the recurrence for verified tokens: what `commit` needs to run it again.

    Attributes:
        conv_input: (B T E+2GM), before the convolution.
        x: (B T N P), after it.
        dt: float32 (B T N).
        B: (B T G M), after the convolution.
        starts_document: bool (B T).
        begin: what documents begin with, None for zeros.
    """

    conv_input: Float[Array, "B T E+2GM"]
    x: Float[Array, "B T N P"]
    dt: Float[Array, "B T N"]
    B: Float[Array, "B T G M"]
    starts_document: Bool[Array, "B T"]
    begin: Mamba2State | None = None


class Mamba2(nnx.Module):
    """State-space duality (arXiv 2405.21060, section 7 and figure 6).

    `z, xBC, dt = u W_in`; `x, B, C = silu(conv(xBC))`; `dt = softplus(dt + bias)`;
    `y = ssd(x, dt, A, B, C) + D x`; the output is `rms_norm(y * silu(z)) W_out`, the norm, if there
    is one, over each group's channels.
    """

    def __init__(self, config: Mamba2Config, build: Build):
        """Draws the two projections, the convolution, and the heads' rates and steps."""
        inner = config.inner_width or config.expand * build.width
        if inner % config.head_dim:
            what = "expand * width" if config.inner_width is None else "inner_width"
            raise ValueError(f"head_dim={config.head_dim} does not divide {what} = {inner}")
        heads = inner // config.head_dim
        if heads % config.num_groups:
            raise ValueError(f"num_groups={config.num_groups} does not divide {heads} heads")
        self.inner, self.heads, self.head_dim = inner, heads, config.head_dim
        self.groups, self.state_size = config.num_groups, config.state_size
        self.conv_width, self.norm_eps = config.conv_width, build.norm_eps
        self.min_step, self.multipliers = config.min_step, config.multipliers
        self.conv_channels = inner + 2 * self.groups * self.state_size
        self.w_in = build.matrix(build.width, inner + self.conv_channels + heads)
        self.conv = conv_kernel(build, config.conv_width, self.conv_channels)
        self.conv_bias = nnx.Param(jnp.zeros((self.conv_channels,), jnp.float32))
        self.dt_bias = step_bias(build, (heads,), config.dt_min, config.dt_max, config.dt_floor)
        low, high = (math.log(rate) for rate in config.a_init_range)
        draw = jax.random.uniform(build.rngs.params(), (heads,), jnp.float32)
        self.A_log = Float32Param(low + draw * (high - low))
        self.D = Float32Param(jnp.ones((heads,), jnp.float32))
        self.norm = Float32Param(jnp.ones((inner,), jnp.float32)) if config.gate_norm else None
        self.w_out = build.matrix(inner, build.width, residual=True)

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> Mamba2State:
        """Zeros. Float32 whatever `dtype` says: rounding errors of a recurrence pile up."""
        del max_len, dtype
        return Mamba2State(
            conv=jnp.zeros((batch, self.conv_width - 1, self.conv_channels), jnp.float32),
            ssm=jnp.zeros((batch, self.heads, self.head_dim, self.state_size), jnp.float32),
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: Mamba2State | None, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Mamba2State | None]:
        """Runs the recurrence from the state (or from zeros) over the row's valid tokens."""
        # Without a state to hand on, padding can stay: it is behind the tokens that it could touch.
        lengths = None if state is None else ctx.lengths
        before = state if state is not None and ctx.history else Mamba2State(None, None)
        z, conv_input, dt = self._enter(x)
        y, after, _ = self._run(conv_input, dt, before, ctx, lengths)
        return self._leave(y, z), None if state is None else after

    def absorb(
        self, x: Float[Array, "1 M D"], ctx: LayerContext
    ) -> tuple[Float[Array, "1 M D"], Mamba2State]:
        """Runs over meta tokens; documents begin with the state after them."""
        return self(x, self.init_state(1, 0, dtype=x.dtype), ctx)

    def verify(
        self, x: Float[Array, "B T D"], state: Mamba2State, ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], Mamba2Pending]:
        """Runs the recurrence and keeps its inputs instead of its states."""
        z, conv_input, dt = self._enter(x)
        begin = ctx.begin
        conv = known_state(state.conv, ctx.start)
        if ctx.parents is None:
            before = Mamba2State(conv, known_state(state.ssm, ctx.start))
            y, _, (x, B) = self._run(conv_input, dt, before, ctx, None)
        else:
            taps = self.conv[...]
            activation = "silu" if begin is None else None
            mixed = causal_conv1d_tree(
                conv_input, taps, self.conv_bias[...], ctx.parents, state=conv,
                activation=activation,
            )  # fmt: skip
            if begin is not None:
                extra = conv_of_begin(taps, begin.conv, ctx.positions)
                mixed = silu_like(mixed.astype(jnp.float32) + extra, z)
            x, B, C = self._split(mixed)
            ssm = known_state(state.ssm, ctx.start, None if begin is None else begin.ssm)
            y = ssd_tree(x, dt, self._A(), B, C, ctx.parents, D=self.D[...], state=ssm)
        pending = Mamba2Pending(conv_input, x, dt, B, ctx.starts_document, begin)
        return self._leave(y, z), pending

    def commit(
        self,
        state: Mamba2State,
        pending: Mamba2Pending,
        path: Int[Array, "B K"],
        accepted: Int[Array, " B"],
    ) -> Mamba2State:
        """Runs the recurrence alone again, over the accepted tokens of the path."""
        conv_input, x, dt, B, reset = (along(values, path) for values in pending[:-1])
        _, conv = causal_conv1d(
            conv_input, self.conv[...], None, state=state.conv, reset=reset, lengths=accepted
        )
        # What is read out is dropped, so that any C will do.
        _, ssm = ssd(x, dt, self._A(), B, B, state=state.ssm, reset=reset, lengths=accepted)
        if pending.begin is not None:
            ssm = self._with_begin(ssm, pending.begin, *since_reset(dt, reset), accepted)
        return Mamba2State(conv, ssm)

    def cost(self, batch: int, new_tokens: int, context: int, bytes_per_value: int) -> Cost:
        """Two projections, the convolution and the recurrence (five operations per state value).

        The chunked form does more arithmetic than the recurrence, on faster units.
        """
        del bytes_per_value
        width, columns = shape_of(self.w_in)
        projections = 2 * width * (columns + self.inner)
        recurrence = 2 * self.conv_width * self.conv_channels
        recurrence += self.inner * (5 * self.state_size + 3)
        values = (self.conv_width - 1) * self.conv_channels + self.inner * self.state_size
        return Cost(
            flops=float(batch * new_tokens * (projections + recurrence)),
            bytes_read=float(4 * batch * values if context else 0),
            state_bytes_fixed=float(4 * batch * values),
            state_bytes_per_token=0.0,
            mixing_flops=float(batch * new_tokens * recurrence),
            bytes_written=float(4 * batch * values),
        )

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """Causal masks only."""
        del stateful
        return refuse_lookahead("mamba2", ctx)

    def _enter(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
        """The gate z, the convolution's input and the step sizes (float32)."""
        joined = linear(x, self.w_in[...])
        if any(factor != 1.0 for factor in self.multipliers):
            groups = self.groups * self.state_size
            sizes = (self.inner, self.inner, groups, groups, self.heads)
            joined = joined * np.repeat(self.multipliers, sizes).astype(joined.dtype)
        z, conv_input, dt = split_columns(joined, (self.inner, self.conv_channels, self.heads))
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...])
        if self.min_step:
            dt = jnp.maximum(dt, self.min_step)
        return z, conv_input, dt

    def _run(
        self,
        conv_input: Float[Array, "B T E+2GM"],
        dt: Float[Array, "B T N"],
        before: Mamba2State,
        ctx: LayerContext,
        lengths: Int[Array, " B"] | None,
    ) -> tuple[Array, Mamba2State, tuple[Array, Array]]:
        """Convolution and recurrence; returns y (B T N P), the state after, and x and B.

        Documents that begin with a state get its response added: the recurrence is linear in it.
        """
        reset, begin = ctx.starts_document, ctx.begin
        taps, A = self.conv[...], self._A()
        activation = "silu" if begin is None else None
        mixed, conv = causal_conv1d(
            conv_input, taps, self.conv_bias[...], state=before.conv, reset=reset,
            lengths=lengths, activation=activation,
        )  # fmt: skip
        if begin is not None:
            extra = conv_of_begin(taps, begin.conv, ctx.positions)
            mixed = silu_like(mixed.astype(jnp.float32) + extra, conv_input)
        x, B, C = self._split(mixed)
        y, ssm = ssd(
            x, dt, A, B, C, D=self.D[...], state=before.ssm, reset=reset, lengths=lengths
        )
        if begin is not None:
            total, started = since_reset(dt, reset)
            rest = jnp.where(started[:, :, None], jnp.exp(A * total), 0.0)
            C_heads = jnp.repeat(C.astype(jnp.float32), self.heads // self.groups, axis=2)
            response = jnp.einsum("btnm,npm->btnp", C_heads, begin.ssm[0])
            y = (y.astype(jnp.float32) + rest[..., None] * response).astype(y.dtype)
            if lengths is not None:
                ssm = self._with_begin(ssm, begin, total, started, lengths)
        return y, Mamba2State(conv, ssm), (x, B)

    def _with_begin(
        self,
        ssm: Float[Array, "B N P M"],
        begin: Mamba2State,
        total: Float[Array, "B T N"],
        started: Bool[Array, "B T"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B N P M"]:
        """The state with what is left of `begin` in documents that began in this call."""
        rest = jnp.exp(self._A() * last_of(total, lengths))[:, :, None, None] * begin.ssm
        took = (lengths > 0) & last_of(started, lengths)
        return ssm + jnp.where(took[:, None, None, None], rest, 0.0)

    def _split(self, mixed: Float[Array, "B T E+2GM"]) -> tuple[Array, Array, Array]:
        """X by heads, B and C by groups."""
        shape = mixed.shape[:2]
        of_group = self.groups * self.state_size
        x, B, C = split_columns(mixed, (self.inner, of_group, of_group))
        by_group = (*shape, self.groups, self.state_size)
        x = x.reshape(*shape, self.heads, self.head_dim)
        return x, B.reshape(by_group), C.reshape(by_group)

    def _leave(
        self, y: Float[Array, "B T N P"], z: Float[Array, "B T E"]
    ) -> Float[Array, "B T D"]:
        gated = y.reshape(z.shape).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None:
            return linear(gated.astype(z.dtype), self.w_out[...])
        by_group = (*z.shape[:2], self.groups, -1)
        normed = rms_norm(gated.reshape(by_group), None, self.norm_eps).reshape(z.shape)
        y = (normed * self.norm[...]).astype(z.dtype)
        return linear(y, self.w_out[...])

    def _A(self) -> Float[Array, " N"]:
        return -jnp.exp(self.A_log[...])
