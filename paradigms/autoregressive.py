"""The autoregressive paradigm: each token is predicted from those before it."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Key
from pydantic import Field

from .config import Config
from .context import Context
from .interface import Batch, Likelihood, LossSums, Out, SpecialIds
from .masks import Causal
from .model import Model


class AutoregressiveConfig(Config):
    """Next-token prediction.

    Attributes:
        z_loss: factor on the squared log of the softmax denominator (PaLM, arXiv 2204.02311, sec.
            5), which keeps logits from drifting; 0 for none.
    """

    name: Literal["autoregressive"] = "autoregressive"
    z_loss: float = Field(default=0.0, ge=0.0)

    def build(self, specials: SpecialIds) -> "Autoregressive":
        """Makes the paradigm; no special id matters to it."""
        del specials
        return Autoregressive(z_loss=self.z_loss)


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Cross-entropy of `token[i+1]` under the logits at `i`: the only place that shifts.

    A target counts when it is scored (`loss_mask`), real, and of the same document as the token
    before it; nothing is predicted across a document border or a row's end.
    """

    name: ClassVar[str] = "autoregressive"
    is_bound: ClassVar[bool] = False
    z_loss: float = 0.0

    def loss(
        self,
        model: Model,
        batch: Batch,
        *,
        key: Key[Array, ""],
        train: bool,
        remat: bool = False,
    ) -> LossSums:
        """Sums of cross-entropy and auxiliary losses over the scored targets.

        Args:
            model: cast to the compute dtype.
            batch: unshifted rows.
            key: for dropout.
            train: switches dropout on.
            remat: recompute layers in the backward pass.
        """
        dropout_key = key if train and model.config.dropout > 0 else None
        nll, log_total, counted, out = self._forward(model, batch, dropout_key, remat)
        weight = jnp.sum(counted, dtype=jnp.float32)
        aux_sum = weight * sum(out.aux.values(), jnp.zeros((), jnp.float32))
        if self.z_loss:
            aux_sum += self.z_loss * jnp.sum(jnp.where(counted, log_total**2, 0.0))
        stats = {name: value * weight for name, value in out.stats.items()}
        return LossSums(jnp.sum(nll), weight, aux_sum, weight, stats)

    def log_likelihood(self, model: Model, batch: Batch, *, key: Key[Array, ""]) -> Likelihood:
        """Exact negative log-likelihood of each row's scored tokens; `key` is not needed."""
        del key
        nll, _, counted, _ = self._forward(model, batch, None, False)
        rows = batch.tokens.shape[0]
        return Likelihood(
            nll_nats=jnp.sum(nll, axis=1),
            tokens=jnp.sum(counted, axis=1, dtype=jnp.int32),
            variance=jnp.zeros((rows,), jnp.float32),
            draws=0,
            is_bound=False,
        )

    def _forward(
        self, model: Model, batch: Batch, dropout_key: Key[Array, ""] | None, remat: bool
    ) -> tuple[Float[Array, "B t"], Float[Array, "B t"], Bool[Array, "B t"], Out]:
        """Per target: NLL (0 where not counted), log denominator, counted; and `Out`."""
        ctx = Context(segment_ids=batch.segment_ids, mask=Causal(), dropout_key=dropout_key)
        out, _ = model(batch.tokens, ctx=ctx, remat=remat)
        logits = model.head(out.hidden[:, :-1])
        target, segments = batch.tokens[:, 1:], batch.segment_ids
        counted = batch.loss_mask[:, 1:] & (segments[:, 1:] >= 0)
        counted &= segments[:, 1:] == segments[:, :-1]
        log_total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return jnp.where(counted, log_total - chosen, 0.0), log_total, counted, out
