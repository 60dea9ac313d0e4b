"""Lets a model answer prompts, and says how sure a share is."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, GenlabError
from ...paradigms.decoding.loop import advance, finished
from ...paradigms.decoding.sampling import make_sampling
from ...paradigms.decoding.state import raise_failures
from ...paradigms.interface import SpecialIds
from ...paradigms.model import Model, abstract_model
from ..results import Interval

Z95 = 1.959963984540054  # of the normal law, two-sided 95 %


def wilson(successes: float, trials: float) -> Interval:
    """Wilson's 95 % score interval of a share (Wilson 1927): inside [0, 1] also at its ends.

    Args:
        successes: from 0 to `trials`.
        trials: more than 0; both may be fractions where trials are not independent.
    """
    share, z2 = successes / trials, Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(
        share * (1 - share) / trials + z2 / (4 * trials**2)
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def with_room(model: Model, length: int) -> Model:
    """The same parameters, for rows of `length` tokens; the model itself if it has the room.

    Args:
        model: ready to compute.
        length: tokens of a row.
    """
    if model.config.max_len >= length:
        return model
    config = model.config.model_copy(update={"max_len": length})
    return abstract_model(config).with_params(model.params).prepare(model.dtype)


class Answers(NamedTuple):
    """Attributes: symbols int32 [n A]; nfe, mean model calls per row."""

    symbols: NDArray[np.int32]
    nfe: float


def answer(
    model: Model,
    decoding: Any,
    specials: SpecialIds,
    prompts: NDArray[np.integer],
    *,
    new_tokens: int,
    batch_size: int,
    temperature: float,
    seed: int,
    steps_per_token: float,
) -> Answers:
    """Continues prompts, BOS put before them, by exactly `new_tokens` symbols.

    Args:
        model: ready to compute, with room.
        decoding: of the model's paradigm.
        specials: special ids; never drawn.
        prompts: integers [n P].
        new_tokens: A.
        batch_size: rows per call; the last batch is filled up, so that one program suffices.
        temperature: 0 for the most probable symbols.
        seed: row i draws with seed + i.
        steps_per_token: for decodings that take a number of model calls.

    Raises:
        ConfigError: model and task have other vocabularies.
        GenlabError: the decoding did not come to an end, or logits are not finite.
    """
    if model.config.vocab_size != max(specials) + 1:
        raise ConfigError(
            f"the model has {model.config.vocab_size} ids, the task {max(specials) + 1}: it was "
            "trained on something else"
        )
    count, width = prompts.shape
    steps = max(1, round(new_tokens * steps_per_token)) if decoding.uses_steps else 0
    sampling = make_sampling(
        batch_size,
        vocab_size=model.config.padded_vocab_size,
        temperature=temperature,
        steps=steps,
        forbidden_ids=sorted(set(specials)),
    )
    symbols, calls = np.empty((count, new_tokens), np.int32), np.empty(count)
    for start in range(0, count, batch_size):
        rows = np.minimum(np.arange(start, start + batch_size), count - 1)
        begin = np.full((batch_size, 1), specials.bos)
        state = decoding.start(
            model,
            np.concatenate([begin, prompts[rows]], axis=1).astype(np.int32),
            sampling=sampling,
            seeds=(seed + rows).astype(np.int32),
            max_new=np.full(batch_size, new_tokens, np.int32),
            max_len=1 + width + new_tokens,
        )
        state = advance(model, decoding, state, new_tokens + steps + 1)
        raise_failures(state)
        if not finished(state):
            raise GenlabError(f"decoding {decoding.name!r} left answers unfinished")
        real = min(batch_size, count - start)
        symbols[start : start + real] = np.asarray(state.tokens)[:real, 1 + width :]
        calls[start : start + real] = np.asarray(state.nfe)[:real]
    return Answers(symbols, float(calls.mean()))
