"""AdamW as Loshchilov and Hutter define it (arXiv 1711.05101), and the clipping before it."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float
from pydantic import Field

from ..paradigms.config import Config
from ..paradigms.model import Model


class AdamWConfig(Config):
    """AdamW.

    Attributes:
        learning_rate: the schedule's peak.
        beta1, beta2: decay of the running mean and mean square of the gradient.
        eps: added to the root mean square.
        weight_decay: each update takes learning rate times this off every matrix. Norm scales,
            biases and the float32 parameters of state-space layers are left alone.
        clip_norm: gradients longer than this (all parameters together) are scaled down to it;
            null for never.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(gt=0.0)
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)
    clip_norm: float | None = Field(default=1.0, gt=0.0)

    def build(self, schedule: optax.Schedule, decay_mask: dict) -> optax.GradientTransformation:
        """Makes the transformation of clipped gradients into updates.

        Decay is added after the adaptive step, so it is decoupled: with a zero gradient, learning
        rate 0.1 and decay 0.1 a weight of 1 becomes 0.99.

        Args:
            schedule: update number -> learning rate.
            decay_mask: nested dict of bool, True where decay applies.
        """
        return optax.chain(
            optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.eps),
            optax.add_decayed_weights(self.weight_decay, mask=decay_mask),
            optax.scale_by_learning_rate(schedule),
        )


OptimizerConfig = AdamWConfig


def clip_by_norm(
    gradients: dict, limit: float | None
) -> tuple[dict, Float[Array, ""]]:
    """Scales gradients down to a norm of `limit`; returns them and the norm before."""
    norm = optax.tree.norm(gradients)
    if limit is None:
        return gradients, norm
    factor = jnp.where(norm > limit, limit / norm, 1.0)
    return jax.tree.map(lambda g: g * factor, gradients), norm


def decayed_paths(model: Model) -> list[str]:
    """Names of the parameters that weight decay applies to, as the run's start lists them."""
    flat, _ = jax.tree_util.tree_flatten_with_path(model.decay_mask())
    return [".".join(str(entry.key) for entry in path) for path, decays in flat if decays]
