"""Rotary position embedding (arXiv 2104.09864), and how it is stretched to longer texts."""

import math
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int
from pydantic import Field, model_validator

from ..config import Config, choice_of

Phases = tuple[Float[Array, "B T h"], Float[Array, "B T h"]]


class LinearScaling(Config):
    """Positions divided by a factor (arXiv 2306.15595, eq. 4).

    Attributes:
        factor: how much longer texts may become.
    """

    name: Literal["linear"] = "linear"
    factor: float = Field(gt=0.0)

    def frequencies(self, dim: int, base: float, longest: Array) -> Array:
        """Radians per position, (dim / 2)."""
        del longest
        return _frequencies(dim, base) / self.factor

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine."""
        return 1.0


class DynamicScaling(Config):
    """A base that grows with the row, once it is longer than `original_max_len` (dynamic NTK).

    Keys are rotated by the base that held when they were written, as published code has it, so
    beyond `original_max_len` decoding token by token is not the same function as one pass over
    the whole row.

    Attributes:
        factor: on the part of the length that exceeds the original one.
        original_max_len: tokens up to which nothing changes.
    """

    name: Literal["dynamic"] = "dynamic"
    factor: float = Field(gt=0.0)
    original_max_len: int = Field(ge=1)

    def frequencies(self, dim: int, base: float, longest: Array) -> Array:
        """Radians per position, (B 1 dim/2): each row has its own."""
        if dim <= 2:
            return _frequencies(dim, base)
        length = jnp.maximum(longest, self.original_max_len).astype(jnp.float32)
        growth = self.factor * length / self.original_max_len - (self.factor - 1)
        grown = base * growth ** (dim / (dim - 2))
        return _frequencies(dim, grown[:, None, None])

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine."""
        return 1.0


class Llama3Scaling(Config):
    """Slow phases divided by a factor, fast ones kept, a blend between (Llama 3.1).

    Attributes:
        factor: how much the slow phases are slowed.
        low_freq_factor: phases of fewer turns than this over the original length are slow.
        high_freq_factor: phases of more turns than this are fast.
        original_max_len: tokens that the model was first trained on.
    """

    name: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0.0)
    low_freq_factor: float = Field(gt=0.0)
    high_freq_factor: float = Field(gt=0.0)
    original_max_len: int = Field(ge=1)

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "Llama3Scaling":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        return self

    def frequencies(self, dim: int, base: float, longest: Array) -> Array:
        """Radians per position, (dim / 2)."""
        del longest
        fast = _frequencies(dim, base)
        turns = self.original_max_len * fast / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return share * fast + (1 - share) * fast / self.factor

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine."""
        return 1.0


class YarnScaling(Config):
    """Slow phases divided by a factor, with a ramp over the channels (YaRN, arXiv 2309.00071).

    Attributes:
        factor: how much the slow phases are slowed (s of sec. 3.2).
        original_max_len: tokens that the model was first trained on.
        beta_fast: phases of more turns than this over the original length are kept.
        beta_slow: phases of fewer turns than this are slowed in full.
        attention_factor: on cosine and sine; null means 0.1 ln(factor) + 1 (eq. 22).
        truncate: round the ends of the ramp to whole channels.
    """

    name: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0.0)
    original_max_len: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0.0)
    beta_slow: float = Field(default=1.0, gt=0.0)
    attention_factor: float | None = Field(default=None, gt=0.0)
    truncate: bool = True

    def frequencies(self, dim: int, base: float, longest: Array) -> Array:
        """Radians per position, (dim / 2)."""
        del longest
        low = self._channel(self.beta_fast, dim, base)
        high = self._channel(self.beta_slow, dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0.0
        share = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)
        fast = _frequencies(dim, base)
        return share * fast / self.factor + (1 - share) * fast

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _channel(self, turns: float, dim: int, base: float) -> float:
        """The channel whose phase turns that often over the original length."""
        turn = self.original_max_len / (turns * 2 * math.pi)
        return dim * math.log(turn) / (2 * math.log(base))


RopeScaling = choice_of(
    {
        "linear": LinearScaling,
        "dynamic": DynamicScaling,
        "llama3": Llama3Scaling,
        "yarn": YarnScaling,
    }
)


def rotary_phases(
    positions: Int[Array, "B T"],
    head_dim: int,
    base: float,
    scaling: Any = None,
    lengths: Int[Array, " B"] | None = None,
) -> Phases:
    """Cosine and sine of `position * base^(-2i/H)` for i < H/2, always in float32.

    Computed from integer positions at each call: there is no table that a cast could spoil.

    Args:
        positions: of the tokens in their documents.
        head_dim: H, the channels that are rotated.
        base: of the phases.
        scaling: one of `RopeScaling` or None.
        lengths: valid tokens per row, for scalings that depend on the longest position.
    """
    if scaling is None:
        angle = positions[..., None].astype(jnp.float32) * _frequencies(head_dim, base)
        return jnp.cos(angle), jnp.sin(angle)
    real = positions
    if lengths is not None:
        index = jnp.arange(positions.shape[1], dtype=jnp.int32)
        real = jnp.where(index < lengths[:, None], positions, 0)
    longest = jnp.max(real, axis=1) + 1
    angle = positions[..., None].astype(jnp.float32) * scaling.frequencies(head_dim, base, longest)
    return jnp.cos(angle) * scaling.amplitude, jnp.sin(angle) * scaling.amplitude


def rotate(x: Float[Array, "B T N H"], phases: Phases) -> Float[Array, "B T N H"]:
    """Rotates the pairs (x_i, x_{i+h}) by their h phases, in float32; returns x's dtype.

    With fewer than H/2 phases only the first 2h channels are rotated (arXiv 2204.06745, sec. 2.1).
    """
    cos, sin = (p[:, :, None, :] for p in phases)
    turned = 2 * cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32[..., :turned], 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if turned < x.shape[-1]:
        parts.append(x32[..., turned:])
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def _frequencies(dim: int, base: Any) -> Array:
    """`base^(-2i/dim)` for i < dim/2, radians per position."""
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return base**-exponent
