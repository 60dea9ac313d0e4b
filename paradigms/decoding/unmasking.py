"""Sampling from masked diffusion: a canvas of hidden tokens, uncovered in a given number of calls.

Orders of uncovering:

    random         every order equally likely: any-order generation, exact at one token per call
    ancestral      each token at a step of its own choice: the reverse process of MDLM (arXiv
                   2406.07524, eq. 7) at equally spaced times
    confidence     where the drawn token is most probable ("low-confidence remasking" of LLaDA,
                   arXiv 2502.09992)
    margin         where the best token leads the second best by most (arXiv 2502.06768)
    left_to_right  in reading order

All but `ancestral` divide the tokens evenly among the steps: 10 tokens in 4 steps go 3, 3, 2, 2.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from ...errors import ConfigError
from ..backbone import MASKED
from ..config import Config
from ..context import Context
from ..interface import Paradigm, SpecialIds
from ..masks import Full
from ..model import Model
from .sampling import Purpose, Sampling, allowed_ids, draw, non_finite, position_keys
from .state import DecodeState, Request, check_request, fresh_state

Order = Literal["random", "ancestral", "confidence", "margin", "left_to_right"]


class UnmaskingConfig(Config):
    """How a canvas is uncovered. The number of calls is a sampling setting (`steps`).

    Attributes:
        order: see the module's text.
        block_length: uncover blocks of this many tokens one after another, counted from the
            prompt's end (LLaDA's semi-autoregressive sampling); null for the canvas as a whole.
    """

    name: Literal["unmasking"] = "unmasking"
    order: Order = "random"
    block_length: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _blocks_have_an_order(self) -> "UnmaskingConfig":
        if self.block_length is not None and self.order == "ancestral":
            raise ValueError(
                f"block_length={self.block_length} does not go with order 'ancestral', in which "
                "any token may come at any step; want null, or another order"
            )
        return self

    def build(self, specials: SpecialIds, paradigm: Paradigm) -> "Unmasking":
        """Makes the decoding.

        Raises:
            ConfigError: the paradigm is not masked diffusion.
        """
        if paradigm.name != "masked_diffusion":
            raise ConfigError(
                f"decoding 'unmasking' needs a masked_diffusion model, this one is {paradigm.name}"
            )
        return Unmasking(specials.mask, paradigm.shift, self.order, self.block_length)


@dataclasses.dataclass(frozen=True)
class Unmasking:
    """One model call over the whole canvas per step; a token once uncovered never changes.

    `Sampling.steps` is the number of calls for the whole answer, per row; more than there are
    hidden tokens counts as one per token (`ancestral` takes it as it is, and stops when nothing is
    hidden any more). Each place has one random number for its token, however often it is looked at:
    at each step the tokens to uncover are chosen among the draws from the current law. Stop ids do
    not shorten the work; what follows one is to be cut off the text.

    `cursor` counts the steps taken; `extra` holds how many tokens were hidden at first, int32 (B).

    Attributes:
        mask_id: what the model sees at a hidden place; never drawn.
        shift: the output at position i is about token i + 1.
        order: see the module's text.
        block_length: see `UnmaskingConfig`.
    """

    name: ClassVar[str] = "unmasking"
    uses_steps: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = False
    one_token: ClassVar[bool] = False
    mask_id: int
    shift: bool = False
    order: Order = "random"
    block_length: int | None = None

    def start(
        self,
        model: Model,
        prompt: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        sampling: Sampling,
        seeds: ArrayLike,
        max_new: ArrayLike,
        max_len: int,
    ) -> DecodeState:
        """Lays out the canvas, the prompt and `max_new` hidden tokens; see `Decoding.start`.

        No model call is made.
        """
        request = check_request(
            model,
            prompt,
            valid=valid,
            lengths=lengths,
            sampling=sampling,
            seeds=seeds,
            max_new=max_new,
            max_len=max_len,
        )
        _check_steps(sampling)
        return _canvas(request, None, max_len=max_len)

    def start_canvas(
        self,
        model: Model,
        tokens: ArrayLike,
        known: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        sampling: Sampling,
        seeds: ArrayLike,
    ) -> DecodeState:
        """Lays out a canvas with tokens fixed at any place, to fill in the others.

        Args:
            model: ready to compute.
            tokens: integers (B L), BOS included; what stands at unknown places does not matter.
            known: bool (B L), which tokens are given.
            lengths: integers (B), where each row ends; L when None.
            sampling: see `make_sampling`; needs `steps`.
            seeds: integers (B).

        Returns:
            A state whose `prompt_length` is the number of leading known tokens.

        Raises:
            CapacityError: the canvas is longer than the model can hold.
            ConfigError: a malformed argument, or `shift` and an unknown first token.
        """
        tokens, known = np.asarray(tokens), np.asarray(known)
        if known.dtype != np.bool_ or known.shape != tokens.shape or known.ndim != 2:
            raise ConfigError(f"known: got {known.dtype} {known.shape}, want bool {tokens.shape}")
        batch, length = tokens.shape
        request = check_request(
            model,
            np.where(known, tokens, 0),
            valid=None,
            lengths=lengths,
            sampling=sampling,
            seeds=seeds,
            max_new=np.zeros((batch,), np.int32),
            max_len=length,
        )
        _check_steps(sampling)
        if self.shift and not known[:, 0].all():
            row = int(np.flatnonzero(~known[:, 0])[0])
            raise ConfigError(
                f"known: row {row} hides its first token, which a model with shift=true cannot "
                "predict; want BOS there"
            )
        return _canvas(request, known, max_len=length)

    def step(self, model: Model, state: DecodeState) -> DecodeState:
        """Predicts every hidden token and keeps as many as are due."""
        place = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
        live = ~state.done
        hidden = ~state.known & (place < state.limit[:, None]) & live[:, None]
        tokens = jnp.where(state.known, state.tokens, self.mask_id)
        out, _ = model(tokens, ctx=Context(lengths=state.limit, mask=Full()))
        outputs = out.hidden
        if self.shift:
            outputs = jnp.pad(outputs[:, :-1], ((0, 0), (1, 0), (0, 0)))
        raw = model.head(outputs)
        broken_at = hidden & non_finite(raw)
        broken = jnp.any(broken_at, axis=1)
        # The mask id may not be drawn, and no confidence may rest on it.
        logits = jnp.where(jnp.arange(raw.shape[-1]) == self.mask_id, MASKED, raw)
        places = jnp.broadcast_to(place, state.tokens.shape)
        drawn = draw(logits, state.row_keys, places, Purpose.TOKEN, state.sampling)
        due = self._due(logits, drawn, hidden, state) & ~broken[:, None]
        known = state.known | due
        left = jnp.any(hidden & ~due, axis=1)
        return state._replace(
            tokens=jnp.where(due, drawn, state.tokens),
            known=known,
            cursor=jnp.where(live & ~broken, state.cursor + 1, state.cursor),
            nfe=jnp.where(live, state.nfe + 1, state.nfe),
            token_evals=jnp.where(live, state.token_evals + state.limit, state.token_evals),
            done=state.done | broken | ~left,
            failed_at=jnp.where(
                broken, jnp.argmax(broken_at, axis=1).astype(jnp.int32), state.failed_at
            ),
        )

    def settled(self, state: DecodeState) -> Int[Array, " B"]:
        """The leading run of known tokens: what is uncovered stays."""
        return _leading(state.known)

    def first_output(self, max_new: int) -> int:
        """A token in reading order, else a block, else the whole canvas."""
        if self.order == "left_to_right":
            return min(1, max_new)
        return min(self.block_length or max_new, max_new)

    def options(self) -> dict[str, Any]:
        """Order and block length; the noise is Gumbel's in float32 from 46 bits (`mode="high"`)."""
        return {"order": self.order, "block_length": self.block_length}

    def _due(
        self,
        logits: Float[Array, "B L V"],
        drawn: Int[Array, "B L"],
        hidden: Bool[Array, "B L"],
        state: DecodeState,
    ) -> Bool[Array, "B L"]:
        """Which hidden tokens this step uncovers."""
        total, steps = state.extra, jnp.asarray(state.sampling.steps)
        if self.order == "ancestral":
            at = _step_of_own(_order_bits(state), steps)
            return hidden & (at <= state.cursor[:, None])
        # More steps than tokens: one token in each of the first steps, and then the row is done.
        count = total // steps + (state.cursor < total % steps).astype(jnp.int32)
        place = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None]
        if self.order == "left_to_right":
            late = jnp.broadcast_to(place, hidden.shape).astype(jnp.float32)
        elif self.order == "random":
            late = _order_bits(state)
        else:
            late = -self._certainty(logits, drawn, state.sampling)
        block = jnp.zeros_like(place)
        if self.block_length is not None:
            block = (place - state.prompt_length[:, None]) // self.block_length
        block = jnp.broadcast_to(block, hidden.shape)
        # The last key counts first: hidden places, the earlier block, then the order; the sort is
        # stable, so among equals the lower place comes first.
        ranked = jnp.lexsort((late, block, ~hidden), axis=1)
        rank = jnp.argsort(ranked, axis=1).astype(jnp.int32)
        return hidden & (rank < count[:, None])

    def _certainty(
        self, logits: Float[Array, "B L V"], drawn: Int[Array, "B L"], sampling: Sampling
    ) -> Float[Array, "B L"]:
        """By the law at temperature 1 over the ids that may be drawn."""
        allowed = jnp.where(allowed_ids(logits, sampling), logits, MASKED)
        law = jax.nn.softmax(allowed, axis=-1)
        if self.order == "margin":
            best = jax.lax.top_k(law, 2)[0]
            return best[..., 0] - best[..., 1]
        return jnp.take_along_axis(law, drawn[..., None], axis=-1)[..., 0]


def _order_bits(state: DecodeState) -> Array:
    """uint32 (B L): a random number of each place, the same at every step."""
    places = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
    keys = position_keys(
        state.row_keys, jnp.broadcast_to(places, state.tokens.shape), Purpose.ORDER
    )
    return jax.vmap(jax.vmap(jax.random.bits))(keys)


def _step_of_own(bits: Array, steps: Int[Array, " B"]) -> Int[Array, "B L"]:
    """A step from 0 to steps - 1, each equally likely: floor(u * steps)."""
    u = (bits >> 8).astype(jnp.float32) * 2.0**-24
    at = (u * steps[:, None].astype(jnp.float32)).astype(jnp.int32)
    return jnp.minimum(at, steps[:, None] - 1)


def _leading(known: Bool[Array, "B L"]) -> Int[Array, " B"]:
    return jnp.sum(jnp.cumprod(known.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


@partial(jax.jit, static_argnames=("max_len",))
def _canvas(request: Request, known: ArrayLike | None, *, max_len: int) -> DecodeState:
    state = fresh_state(request, max_len)
    inside = jnp.arange(max_len)[None] < state.limit[:, None]
    if known is not None:
        known = jnp.asarray(known) & inside
        state = state._replace(known=known, prompt_length=_leading(known))
    hidden = jnp.sum(inside & ~state.known, axis=1, dtype=jnp.int32)
    return state._replace(
        extra=hidden, cursor=jnp.zeros_like(state.cursor), done=hidden == 0
    )


def _check_steps(sampling: Sampling) -> None:
    if sampling.allowed is not None:
        raise ConfigError(
            "allowed: decoding 'unmasking' fills places in any order, so it cannot take a limit on "
            "the next token; leave it out"
        )
    steps = np.asarray(sampling.steps)
    if (steps < 1).any():
        raise ConfigError(
            f"steps: got {int(steps.min())}, want the number of model calls for the answer, at "
            "least 1; one per token gives the best text"
        )
