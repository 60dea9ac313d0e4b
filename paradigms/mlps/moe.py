"""Dropless mixture of experts: each token goes to a few of many MLPs."""

from typing import Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float
from pydantic import Field, model_validator

from ...kernels.dispatch import valid_mask
from ...kernels.grouped_matmul import grouped_matmul
from ..config import Config
from ..context import LayerContext
from ..interface import Cost
from ..layers.params import Build, Float32Param, shape_of, weight_bytes
from ..layers.routing import (
    balance,
    expected_distinct,
    group_by_expert,
    mean_over,
    permute,
    route,
)
from .swiglu import SwiGLU, SwiGLUConfig


class MoEConfig(Config):
    """A mixture of SwiGLU experts as a layer's MLP (arXiv 1701.06538; Mixtral, 2401.04088).

    No token is ever dropped, so what a token gets does not depend on the others in the batch.

    Attributes:
        width: F of each expert.
        num_experts: E, those that the router chooses from.
        top_k: experts per token.
        shared_experts: experts of width F that every token goes to as well (DeepSeekMoE, arXiv
            2401.06066, sec. 3.2); their output is added without a gate.
        balance_weight: coefficient of the load-balancing loss of each layer.
        normalize_weights: the gates of the chosen experts sum to 1 (Mixtral); false takes them as
            they are in the softmax over all experts (Switch, Jamba).
        router_z_weight: coefficient of the router's z-loss of each layer (ST-MoE, arXiv
            2202.08906, eq. 5); 0 for none.
    """

    name: Literal["moe"] = "moe"
    width: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    shared_experts: int = Field(default=0, ge=0)
    balance_weight: float = Field(default=0.01, ge=0.0)
    normalize_weights: bool = True
    router_z_weight: float = Field(default=0.0, ge=0.0)

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} is more than num_experts={self.num_experts}; want at most that"
            )
        if self.top_k == 1 and self.normalize_weights:
            raise ValueError(
                "top_k=1 with normalize_weights=true makes every gate 1, so that the router gets "
                "no gradient from the task; want normalize_weights: false"
            )
        return self

    def build(self, build: Build) -> "MoE":
        """Makes the MLP."""
        return MoE(self, build)


class MoE(nnx.Module):
    """`sum_e gate_e expert_e(x)` over the chosen experts, plus the shared ones.

    Expert e is `(silu(g) * u) W_down_e` with `[g, u] = x W_in_e`. Its matrices are arrays of their
    own, so that a step of few tokens reads only those of the experts that were chosen.
    """

    def __init__(self, config: MoEConfig, build: Build):
        """Draws the router and the experts."""
        self.config = config
        # float32 whatever the compute dtype: rounding would change who is chosen.
        router = build.matrix(build.width, config.num_experts)
        self.w_router = Float32Param(router.get_value())
        for index in range(config.num_experts):
            setattr(self, f"w_in_{index}", build.matrix(build.width, 2 * config.width))
            down = build.matrix(config.width, build.width, residual=True)
            setattr(self, f"w_down_{index}", down)
        # Experts that all tokens go to, with nothing between them, are one wider MLP.
        shared = SwiGLUConfig(width=max(config.shared_experts, 1) * config.width)
        self.shared = SwiGLU(shared, build) if config.shared_experts else None

    def __call__(
        self, x: Float[Array, "B T D"], ctx: LayerContext
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Returns the output, and losses and statistics over the rows' real tokens.

        Padding goes to no expert and counts nowhere. The losses are `balance_loss` and
        `router_z_loss` (each where its coefficient is not 0); for the statistics see
        `layers.routing.balance`.
        """
        config, (_, length, width) = self.config, x.shape
        valid = valid_mask(ctx.lengths, length).reshape(-1)
        tokens = jnp.where(valid[:, None], x.reshape(-1, width), 0)
        routing = route(
            tokens, self.w_router[...], config.top_k, normalize=config.normalize_weights
        )
        groups = group_by_expert(routing.experts, valid, config.num_experts)
        rows = permute(jnp.repeat(tokens, config.top_k, axis=0), groups.order, groups.place)
        gate, up = jnp.split(grouped_matmul(rows, self._experts("w_in"), groups.sizes), 2, axis=1)
        hidden = jax.nn.silu(gate) * up
        out = grouped_matmul(hidden, self._experts("w_down"), groups.sizes)
        out = permute(out, groups.place, groups.order).reshape(-1, config.top_k, width)
        y = jnp.sum(out.astype(jnp.float32) * routing.gates[..., None], axis=1)
        y = y.astype(x.dtype).reshape(x.shape)
        if self.shared is not None:
            y += self.shared(x, ctx)[0]
        loss, aux = balance(routing.probs, groups.sizes, valid)
        if config.balance_weight:
            aux["balance_loss"] = config.balance_weight * loss
        if config.router_z_weight:
            z_loss = mean_over(routing.log_total**2, valid)
            aux["router_z_loss"] = config.router_z_weight * z_loss
        return y, aux

    def cost(self, batch: int, new_tokens: int) -> Cost:
        """FLOPs of the router, of the chosen experts and of the shared ones; no state."""
        config = self.config
        width = shape_of(self.w_router)[0]
        experts = (config.top_k + config.shared_experts) * 3 * width * config.width
        flops = 2 * batch * new_tokens * (width * config.num_experts + experts)
        return Cost(float(flops), 0.0, 0.0, 0.0)

    def weight_bytes(self, tokens: int, bytes_per_value: int) -> float:
        """Bytes read by a call on so many tokens that choose their experts evenly at random."""
        config = self.config
        distinct = expected_distinct(config.num_experts, config.top_k, tokens)
        unread = (config.num_experts - distinct) * self._expert_size() * bytes_per_value
        return weight_bytes(self, bytes_per_value) - unread

    def inactive_params(self) -> int:
        """Parameters of the experts that one token does not go to."""
        return (self.config.num_experts - self.config.top_k) * self._expert_size()

    def _experts(self, name: str) -> tuple[Array, ...]:
        return tuple(getattr(self, f"{name}_{i}")[...] for i in range(self.config.num_experts))

    def _expert_size(self) -> int:
        return 3 * shape_of(self.w_router)[0] * self.config.width
