"""The autoregressive paradigm: each token is predicted from those before it."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key
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
        outputs, targets, counted, out = self._forward(model, batch, dropout_key, remat)
        weight = jnp.sum(counted, dtype=jnp.float32)
        aux_sum = weight * sum(out.aux.values(), jnp.zeros((), jnp.float32))
        if self.z_loss:
            nll, log_total = model.nll(outputs, targets)
            nll_sum = jnp.sum(jnp.where(counted, nll, 0.0))
            aux_sum += self.z_loss * jnp.sum(jnp.where(counted, log_total**2, 0.0))
        else:
            nll_sum = model.weighted_nll(outputs, targets, counted.astype(jnp.float32))
        stats = {name: value * weight for name, value in out.stats.items()}
        return LossSums(nll_sum, weight, aux_sum, weight, stats)

    def log_likelihood(self, model: Model, batch: Batch, *, key: Key[Array, ""]) -> Likelihood:
        """Exact negative log-likelihood of each row's scored tokens; `key` is not needed."""
        del key
        outputs, targets, counted, _ = self._forward(model, batch, None, False)
        nll = jnp.where(counted, model.nll(outputs, targets)[0], 0.0)
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
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T"], Bool[Array, "B T"], Out]:
        """Per position: the hidden state, the next id, whether it counts; and `Out`.

        A row's last position predicts nothing and counts for nothing; it stays because a whole row
        is the better shape for the head's matrix product.
        """
        ctx = Context(segment_ids=batch.segment_ids, mask=Causal(), dropout_key=dropout_key)
        out, _ = model(batch.tokens, ctx=ctx, remat=remat)
        segments = batch.segment_ids
        counted = batch.loss_mask[:, 1:] & (segments[:, 1:] >= 0)
        counted &= segments[:, 1:] == segments[:, :-1]
        one_more = ((0, 0), (0, 1))
        targets = jnp.pad(batch.tokens[:, 1:], one_more)
        return out.hidden, targets, jnp.pad(counted, one_more), out
