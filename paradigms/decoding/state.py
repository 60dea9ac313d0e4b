"""What a batch of requests looks like while it is decoded, and how a request enters."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Key
from numpy.typing import ArrayLike

from ...errors import CapacityError, ConfigError, GenlabError
from ..model import Model
from .sampling import Sampling


class DecodeState(NamedTuple):
    """A batch of rows in the making. A row that is done never changes again.

    Attributes:
        tokens: int32 (B L), the prompt first, then the answer; 0 where nothing is known yet.
        known: bool (B L), where `tokens` holds a token of the prompt or of the answer.
        prompt_length: int32 (B).
        limit: int32 (B), prompt_length + max_new: the row ends here at the latest.
        model_state: the model's memory, or None for a decoding that keeps none.
        extra: what belongs to the decoding alone (None for none).
        sampling: the settings.
        row_keys: PRNG key of each row, from its seed alone.
        cursor: int32 (B), where the next token goes, or the decoding's own progress.
        nfe: int32 (B), model calls made for the row.
        token_evals: int32 (B), tokens pushed through the model for the row.
        done: bool (B).
        failed_at: int32 (B), the position at which the model gave logits that are not finite, -1
            for none. Such a row is done; `raise_failures` reports it.
    """

    tokens: Int[Array, "B L"]
    known: Bool[Array, "B L"]
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    model_state: Any
    extra: Any
    sampling: Sampling
    row_keys: Key[Array, " B"]
    cursor: Int[Array, " B"]
    nfe: Int[Array, " B"]
    token_evals: Int[Array, " B"]
    done: Bool[Array, " B"]
    failed_at: Int[Array, " B"]


class Decoding(Protocol):
    """How a trained model is run. A frozen, hashable dataclass, so that it is static in `jax.jit`.

    Attributes:
        name: the registered name.
        uses_steps: True when the number of model calls is a setting (`Sampling.steps`).
        keeps_state: True when `DecodeState.model_state` holds the model's memory of the row.
        one_token: True when `start` and each `step` draw the one next token of each row, so that
            `Sampling.allowed` can limit it. Other decodings refuse that setting.
    """

    name: str
    uses_steps: bool
    keeps_state: bool
    one_token: bool

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
        """Checks the request on the host and takes the prompt in.

        Args:
            model: ready to compute (see `Model.prepare`).
            prompt: integers (B T), BOS included.
            valid: bool (B T), which are real; padding may stand anywhere. All when None.
            lengths: integers (B): instead of `valid`, when each row's real tokens come first.
            sampling: see `make_sampling`.
            seeds: integers (B); equal seeds and prompts give equal answers.
            max_new: integers (B), tokens to add at most.
            max_len: L, room for prompt and answer. Static: each value compiles a program.

        Raises:
            CapacityError: a row needs more than `max_len` or than the model can hold.
            ConfigError: a setting that this decoding has no use for, or a malformed argument.
        """
        ...

    def step(self, model: Model, state: DecodeState) -> DecodeState:
        """One decode, verify or denoise step for every row that is not done. Traceable."""
        ...

    def settled(self, state: DecodeState) -> Int[Array, " B"]:
        """How many leading tokens of each row, prompt included, can no longer change."""
        ...

    def first_output(self, max_new: int) -> int:
        """How many tokens of an answer of `max_new` must be settled before its first part is out.

        The time to the first token waits for them: one token where tokens come one after another,
        a block where blocks do, all where the canvas is uncovered in any order.
        """
        ...

    def options(self) -> dict[str, Any]:
        """The decoding's own settings, for the record."""
        ...


class Request(NamedTuple):
    """A checked request, NumPy arrays: each row's real tokens first, zeros behind them.

    Attributes:
        tokens: int32 (B T).
        lengths: int32 (B).
        max_new: int32 (B).
        seeds: int32 (B).
        sampling: of B rows and the model's V.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    max_new: np.ndarray
    seeds: np.ndarray
    sampling: Sampling


def check_request(
    model: Model,
    prompt: ArrayLike,
    *,
    valid: ArrayLike | None,
    lengths: ArrayLike | None,
    sampling: Sampling,
    seeds: ArrayLike,
    max_new: ArrayLike,
    max_len: int,
) -> Request:
    """Checks a request and brings every row's real tokens to the front; see `Decoding.start`.

    Raises:
        CapacityError: a row needs more than `max_len` or `model.config.max_len` tokens.
        ConfigError: a malformed argument.
    """
    tokens = np.asarray(prompt)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ConfigError(f"prompt: got {tokens.dtype} {tokens.shape}, want integers (B T)")
    batch, width = tokens.shape
    lengths = _row_integers("lengths", lengths, batch) if lengths is not None else None
    max_new = _row_integers("max_new", max_new, batch)
    seeds = _row_integers("seeds", seeds, batch)
    if sampling.temperature.shape != (batch,):
        raise ConfigError(
            f"sampling: made for {sampling.temperature.shape[0]} rows, the prompt has {batch}"
        )
    vocab_size = model.config.padded_vocab_size
    if sampling.forbidden.shape != (vocab_size,):
        raise ConfigError(
            f"sampling: made for {sampling.forbidden.shape[0]} ids, the model has {vocab_size}"
        )
    if valid is not None:
        if lengths is not None:
            raise ConfigError("prompt: give valid or lengths, not both")
        valid = np.asarray(valid)
        if valid.dtype != np.bool_ or valid.shape != tokens.shape:
            raise ConfigError(
                f"valid: got {valid.dtype} {valid.shape}, want bool {tokens.shape}"
            )
        tokens = np.take_along_axis(tokens, np.argsort(~valid, axis=1, kind="stable"), axis=1)
        lengths = valid.sum(axis=1)
    elif lengths is None:
        lengths = np.full((batch,), width)
    for row in range(batch):
        if not 1 <= lengths[row] <= width:
            raise ConfigError(
                f"prompt: row {row} has {lengths[row]} tokens, want 1 to {width} (an empty prompt "
                "is BOS alone)"
            )
        room = min(max_len, model.config.max_len)
        if lengths[row] + max_new[row] > room:
            raise CapacityError(
                f"row {row}: a prompt of {lengths[row]} tokens and max_new={max_new[row]} need "
                f"{lengths[row] + max_new[row]} places, but there is room for {room}"
            )
    inside = np.arange(width)[None] < lengths[:, None]
    tokens = np.where(inside, tokens, 0)
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        row, at = np.argwhere(outside)[0]
        raise ConfigError(
            f"prompt: row {row} has the id {tokens[row, at]}, want ids from 0 to {vocab_size - 1}"
        )
    # Rows are as wide as the caller made them (widths are programs), but never beyond the canvas.
    tokens = tokens[:, :max_len].astype(np.int32)
    return Request(
        tokens, lengths.astype(np.int32), max_new.astype(np.int32), seeds.astype(np.int32), sampling
    )


def fresh_state(
    request: Request, max_len: int, *, model_state: Any = None, extra: Any = None
) -> DecodeState:
    """The state of a request before any model call. Traceable; `max_len` is static.

    Rows with nothing to generate are done at once.
    """
    tokens, lengths = jnp.asarray(request.tokens), jnp.asarray(request.lengths)
    batch, width = tokens.shape
    zeros = jnp.zeros((batch,), jnp.int32)
    return DecodeState(
        tokens=jnp.pad(tokens, ((0, 0), (0, max_len - width))),
        known=jnp.arange(max_len)[None] < lengths[:, None],
        # Copies: the caller keeps the arguments, while `advance` takes the state's buffers over.
        prompt_length=jnp.copy(lengths),
        limit=lengths + request.max_new,
        model_state=model_state,
        extra=extra,
        sampling=jax.tree.map(jnp.copy, request.sampling),
        row_keys=row_keys(request.seeds),
        cursor=lengths + zeros,
        nfe=zeros,
        token_evals=jnp.copy(zeros),
        done=jnp.asarray(request.max_new) <= 0,
        failed_at=jnp.full((batch,), -1, jnp.int32),
    )


def row_keys(seeds: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of each row, of its seed alone."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds))


def raise_failures(state: DecodeState) -> None:
    """Reports logits that were not finite.

    Raises:
        GenlabError: names the first such row and position.
    """
    failed = np.asarray(state.failed_at)
    if (failed >= 0).any():
        row = int(np.flatnonzero(failed >= 0)[0])
        raise GenlabError(
            f"the model gave non-finite logits at position {failed[row]} of row {row}: its "
            "parameters are broken or its compute dtype overflows"
        )


def _row_integers(name: str, value: ArrayLike, batch: int) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.shape != (batch,):
        raise ConfigError(f"{name}: got {array.dtype} {array.shape}, want integers ({batch},)")
    if (array < 0).any() or (array > np.iinfo(np.int32).max).any():
        bad = array[(array < 0) | (array > np.iinfo(np.int32).max)][0]
        raise ConfigError(f"{name}: got {bad}, want 0 to {np.iinfo(np.int32).max}")
    return array.astype(np.int64)
