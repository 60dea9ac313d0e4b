"""Learning rate over the run, in optimizer updates."""

from typing import Any, Literal

import jax.numpy as jnp
import optax
from pydantic import Field, model_validator

from ..paradigms.config import Config, choice_of


class _WarmupConfig(Config):
    """What all schedules begin with.

    Attributes:
        warmup_fraction: share of the run's updates over which the rate rises linearly. The first
            update already has a rate above 0.
    """

    warmup_fraction: float = Field(default=0.05, ge=0.0, le=1.0)

    def warmup_updates(self, updates: int) -> int:
        """Updates of the warm-up in a run of `updates`."""
        return round(self.warmup_fraction * updates)


class ConstantConfig(_WarmupConfig):
    """Warm-up, then the same rate to the end."""

    name: Literal["constant"] = "constant"

    def build(self, peak: float, updates: int) -> optax.Schedule:
        """Returns update number (from 0) -> learning rate."""
        return _schedule(peak, updates, self.warmup_updates(updates), 0, lambda x: 1.0)


class CosineConfig(_WarmupConfig):
    """Warm-up, then half a cosine down to a share of the peak.

    Attributes:
        final_fraction: rate after the last update, as a share of the peak.
    """

    name: Literal["cosine"] = "cosine"
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)

    def build(self, peak: float, updates: int) -> optax.Schedule:
        """Returns update number (from 0) -> learning rate."""
        low, warmup = self.final_fraction, self.warmup_updates(updates)
        return _schedule(
            peak,
            updates,
            warmup,
            updates - warmup,
            lambda x: low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * x)),
        )


class WSDConfig(_WarmupConfig):
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): linear down at the end.

    Attributes:
        decay_fraction: share of the run's updates that the decay takes.
        final_fraction: rate after the last update, as a share of the peak.
    """

    name: Literal["wsd"] = "wsd"
    decay_fraction: float = Field(default=0.2, ge=0.0, le=1.0)
    final_fraction: float = Field(default=0.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _parts_fit(self) -> "WSDConfig":
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction={self.warmup_fraction} and decay_fraction={self.decay_fraction} "
                "are more than the whole run"
            )
        return self

    def build(self, peak: float, updates: int) -> optax.Schedule:
        """Returns update number (from 0) -> learning rate."""
        low, warmup = self.final_fraction, self.warmup_updates(updates)
        decay = min(round(self.decay_fraction * updates), updates - warmup)
        return _schedule(peak, updates, warmup, decay, lambda x: 1 - (1 - low) * x)


ScheduleConfig = choice_of({"cosine": CosineConfig, "wsd": WSDConfig, "constant": ConstantConfig})


def _schedule(peak: float, updates: int, warmup: int, decay: int, shape: Any) -> optax.Schedule:
    """Linear warm-up, a plateau, then `shape` of the decay's progress from 0 to 1."""

    def rate(count: Any) -> Any:
        done = jnp.asarray(count, jnp.float32)
        rising = (done + 1) / max(warmup, 1)
        progress = jnp.clip((done - (updates - decay)) / max(decay, 1), 0.0, 1.0)
        return peak * jnp.where(done < warmup, rising, shape(progress))

    return rate
