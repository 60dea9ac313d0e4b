"""Masked diffusion: hide tokens, predict them all at once from what is left, on both sides."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key
from pydantic import Field, field_validator

from .config import Config
from .context import Context
from .interface import Batch, Likelihood, LossSums, Out, SpecialIds
from .masks import Full
from .model import Model
from .noise import mask_exactly, mask_with_probability, noise_levels


class MaskedDiffusionConfig(Config):
    """The objective of MDLM (arXiv 2406.07524) and LLaDA (arXiv 2502.09992).

    Attributes:
        weight: of the cross-entropy at noise level t in the training loss. "inverse_t": 1/t, the
            published bound on the negative log-likelihood. "uniform": the same for every level;
            no bound. `log_likelihood` reports the proper bound in both cases.
        low_discrepancy: spread the noise levels of a batch evenly (MDLM) or draw them one by one
            (LLaDA).
        shift: the output at position i predicts token i + 1, as in models adapted from
            autoregressive ones (arXiv 2410.17891): a hidden token is predicted where its left
            neighbour stands. A document's first token is then given, not predicted.
        pad_in_loss: in training, padding behind a document is EOS text to be predicted (LLaDA's
            supervised fine-tuning); False: padding is never hidden, seen or counted.
        draws: noise levels per row in `log_likelihood`, an even number.
    """

    name: Literal["masked_diffusion"] = "masked_diffusion"
    weight: Literal["inverse_t", "uniform"] = "inverse_t"
    low_discrepancy: bool = True
    shift: bool = False
    pad_in_loss: bool = False
    draws: int = Field(default=16, ge=2)

    @field_validator("draws")
    @classmethod
    def _draws_are_even(cls, draws: int) -> int:
        if draws % 2:
            raise ValueError(f"draws={draws}: want an even number (two to a stratum)")
        return draws

    def build(self, specials: SpecialIds) -> "MaskedDiffusion":
        """Makes the paradigm for a tokenizer's special ids."""
        return MaskedDiffusion(
            mask_id=specials.mask,
            eos_id=specials.eos,
            inverse_t=self.weight == "inverse_t",
            low_discrepancy=self.low_discrepancy,
            shift=self.shift,
            pad_in_loss=self.pad_in_loss,
            draws=self.draws,
        )


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion:
    """Absorbing-state diffusion with the linear schedule (a token is clean with alpha_t = 1 - t).

    Substitution parametrisation (MDLM, sec. 3.2.3): the mask id has no probability, and a visible
    token stays as it is, so it costs nothing. Tokens with `loss_mask` False (BOS, a prompt) are
    never hidden. Attention is bidirectional within a document.

    Attributes: see `MaskedDiffusionConfig`; `inverse_t` stands for its `weight`.
    """

    name: ClassVar[str] = "masked_diffusion"
    is_bound: ClassVar[bool] = True
    mask_id: int
    eos_id: int
    inverse_t: bool
    low_discrepancy: bool
    shift: bool
    pad_in_loss: bool
    draws: int

    def loss(
        self,
        model: Model,
        batch: Batch,
        *,
        key: Key[Array, ""],
        train: bool,
        remat: bool = False,
    ) -> LossSums:
        """Weighted cross-entropy of hidden tokens at one drawn noise level per row.

        MDLM eq. 10 with alpha_t = 1 - t, LLaDA eq. 3: the sum over hidden tokens, over t. Divided
        by the number of scored tokens it estimates the bound in nats per token, without bias but
        for the levels under `T_MIN`. With weight "uniform" the factor is 2 at every level: like
        1/t it then weighs a token by 1 in expectation.

        Args:
            model: cast to the compute dtype.
            batch: unshifted rows.
            key: draws noise levels, masks and dropout.
            train: switches dropout on.
            remat: recompute layers in the backward pass.
        """
        level_key, mask_key, dropout_key = (jax.random.fold_in(key, i) for i in range(3))
        if not train or model.config.dropout == 0:
            dropout_key = None
        if self.pad_in_loss:
            batch = padding_as_text(batch, self.eos_id)
        counted = self.counted(batch)
        t = noise_levels(
            level_key, batch.tokens.shape[0], low_discrepancy=self.low_discrepancy
        )
        hidden = mask_with_probability(mask_key, counted, t)
        outputs, targets, out = self._predict(model, batch, hidden, dropout_key, remat)
        level_weight = 1.0 / t if self.inverse_t else jnp.full_like(t, 2.0)
        token_weight = jnp.where(hidden, level_weight[:, None], 0.0)
        nll_sum = model.weighted_nll(outputs, targets, token_weight, banned=self.mask_id)
        weight = jnp.sum(counted, dtype=jnp.float32)
        aux_sum = weight * sum(out.aux.values(), jnp.zeros((), jnp.float32))
        stats = {name: value * weight for name, value in out.stats.items()}
        return LossSums(nll_sum, weight, aux_sum, weight, stats)

    def log_likelihood(self, model: Model, batch: Batch, *, key: Key[Array, ""]) -> Likelihood:
        """Estimates the bound -log p(row) <= E_l E_(l of n hidden) [n/l sum of cross-entropies].

        LLaDA eq. 6: l is uniform on 1..n, and exactly l of the row's n scored tokens are hidden,
        which varies less than hiding each with probability t. The levels are stratified: draws
        come in pairs, one pair to each of `draws / 2` equal parts of (0, 1], so the mean is
        unbiased, and so is its variance, the sum of squared differences within pairs over draws^2.
        The training options `weight`, `low_discrepancy` and `pad_in_loss` play no part.

        Args:
            model: cast to the compute dtype.
            batch: unshifted rows.
            key: draws levels and masks; a row's depend on its number, not on other rows.
        """
        counted = self.counted(batch)
        total = jnp.sum(counted, axis=1, dtype=jnp.int32)
        rows = jnp.arange(batch.tokens.shape[0])

        def one_draw(draw: Array) -> Float[Array, " B"]:
            draw_key = jax.random.fold_in(key, draw)
            level_key, mask_key = (jax.random.fold_in(draw_key, i) for i in range(2))
            u = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(level_key, row)))(rows)
            level = ((draw // 2).astype(jnp.float32) + u) / (self.draws // 2)
            count = (level * total.astype(jnp.float32)).astype(jnp.int32) + 1
            count = jnp.clip(count, 1, jnp.maximum(total, 1))
            hidden = mask_exactly(mask_key, counted, count)
            nll = self.hidden_nll(model, batch, hidden)
            return jnp.sum(nll, axis=1) * (total / count)

        values = jax.lax.map(one_draw, jnp.arange(self.draws))
        return Likelihood(
            nll_nats=jnp.mean(values, axis=0),
            tokens=total,
            variance=jnp.sum((values[0::2] - values[1::2]) ** 2, axis=0) / self.draws**2,
            draws=self.draws,
            is_bound=True,
        )

    def counted(self, batch: Batch) -> Bool[Array, "B T"]:
        """The tokens that are scored, and may be hidden."""
        segments = batch.segment_ids
        counted = batch.loss_mask & (segments >= 0)
        if not self.shift:
            return counted
        continues = (segments[:, 1:] == segments[:, :-1]) & counted[:, 1:]
        return jnp.pad(continues, ((0, 0), (1, 0)))

    def hidden_nll(
        self, model: Model, batch: Batch, hidden: Bool[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Cross-entropy of the hidden tokens given the others: nats, 0 elsewhere."""
        outputs, targets, _ = self._predict(model, batch, hidden, None, False)
        nll, _ = model.nll(outputs, targets, banned=self.mask_id)
        return jnp.where(hidden, nll, 0.0)

    def _predict(
        self,
        model: Model,
        batch: Batch,
        hidden: Bool[Array, "B T"],
        dropout_key: Key[Array, ""] | None,
        remat: bool,
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T"], Out]:
        """Hides tokens; returns what predicts each token of the row, the tokens, and `Out`.

        With `shift` the position before predicts, and nothing predicts a row's first token, which
        is never hidden then.
        """
        noisy = jnp.where(hidden, self.mask_id, batch.tokens)
        ctx = Context(segment_ids=batch.segment_ids, mask=Full(), dropout_key=dropout_key)
        out, _ = model(noisy, ctx=ctx, remat=remat)
        outputs = jnp.roll(out.hidden, 1, axis=1) if self.shift else out.hidden
        return outputs, batch.tokens, out


def padding_as_text(batch: Batch, eos_id: int) -> Batch:
    """Turns padding behind a document into scored EOS tokens of that document.

    Padding before a row's first document, and rows of nothing else, stay padding.
    """
    real = batch.segment_ids >= 0
    place = jnp.where(real, jnp.arange(real.shape[1], dtype=jnp.int32)[None], -1)
    last = jax.lax.cummax(place, axis=1)
    segments = jnp.take_along_axis(batch.segment_ids, jnp.maximum(last, 0), axis=1)
    filled = ~real & (last >= 0)
    return Batch(
        tokens=jnp.where(filled, eos_id, batch.tokens),
        segment_ids=jnp.where(last >= 0, segments, -1),
        loss_mask=batch.loss_mask | filled,
    )
