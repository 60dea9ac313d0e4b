"""Blanks of a text filled in by a model that looks both ways: `genlab generate --fill`."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CapacityError, ConfigError
from ..paradigms.decoding.loop import advance
from ..paradigms.decoding.sampling import make_sampling
from ..paradigms.decoding.state import raise_failures
from ..paradigms.decoding.unmasking import Unmasking
from ..train.data.tokenizer import SPECIAL_NAMES, Tokenizer
from .generate import Generator, Options, bucket

# What an answer to a prompt can be told, and a text with blanks cannot.
_OF_ANSWERS = ("max_new", "stop", "truncate_prompt", "constraint")


class Filled(NamedTuple):
    """A text without blanks.

    Attributes:
        text: the whole text.
        ids: its ids, as the model saw them.
        blanks: indices of the blanks in `ids`.
        pieces: what was written into each blank.
        nfe: model calls.
        token_evals: tokens pushed through the model.
    """

    text: str
    ids: list[int]
    blanks: list[int]
    pieces: list[str]
    nfe: int
    token_evals: int


def fill(generator: Generator, texts: Sequence[str], options: Options) -> list[Filled]:
    """Fills the masks of texts, all in one batch.

    Texts begin with BOS and end with EOS where those of the tokenizer do. Nothing but text is
    written into a blank.

    Args:
        generator: with a run of masked diffusion.
        texts: with the tokenizer's mask, such as `[MASK]`, at each blank.
        options: temperature, top_k, top_p, min_p, steps and seed count; 0 steps is one per blank.

    Raises:
        ConfigError: the run is autoregressive, a text has no blank or begins with one that nothing
            predicts, or an option is out of range or of another use.
        CapacityError: a text is longer than the model's rows.
        GenlabError: the model gave non-finite logits.
    """
    decoding, tokenizer = generator.decoding, generator.tokenizer
    if not isinstance(decoding, Unmasking):
        raise ConfigError(
            f"fill: decoding {decoding.name!r} continues a text and cannot fill blanks in it; use "
            "a masked_diffusion run"
        )
    for name in _OF_ANSWERS:
        default = getattr(Options(), name)
        if getattr(options, name) != default:
            raise ConfigError(f"fill: {name} is of answers; a filled text has no such option")
    if isinstance(texts, str) or not texts:
        raise ConfigError(f"fill: got {texts!r}, want a list of at least one text")
    rows = [blanked_ids(tokenizer, text) for text in texts]
    config, mask = generator.model.config, tokenizer.mask_id
    lengths = np.array([len(ids) for ids in rows], np.int32)
    if lengths.max() > config.max_len:
        raise CapacityError(
            f"fill: a text of {lengths.max()} tokens is longer than the model's rows of "
            f"{config.max_len}"
        )
    tokens = np.zeros((len(rows), min(bucket(int(lengths.max())), config.max_len)), np.int32)
    known = np.ones(tokens.shape, bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], known[row, : len(ids)] = ids, ids != mask
    blanks = [np.flatnonzero(~row) for row in known]
    forbidden = {*generator.forbidden, *tokenizer.stop_ids, tokenizer.eos_id}
    forbidden |= {*range(tokenizer.vocab_size, config.padded_vocab_size)}
    sampling = make_sampling(
        len(rows),
        vocab_size=config.padded_vocab_size,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        steps=options.steps or max(map(len, blanks)),
        forbidden_ids=sorted(forbidden),
        stop_ids=[],
    )
    state = decoding.start_canvas(
        generator.model,
        tokens,
        known,
        lengths=lengths,
        sampling=sampling,
        seeds=options.seed + np.arange(len(rows)),
    )
    state = advance(generator.model, decoding, state, tokens.shape[1] + options.steps)
    raise_failures(state)
    found, nfe, evals = (np.asarray(x) for x in (state.tokens, state.nfe, state.token_evals))
    filled = []
    for row, ids in enumerate(rows):
        own = found[row, : len(ids)]
        pieces = [tokenizer.join([one]).decode("utf-8", "replace") for one in own[blanks[row]]]
        filled.append(
            Filled(
                text=tokenizer.decode(own),
                ids=own.tolist(),
                blanks=blanks[row].tolist(),
                pieces=pieces,
                nfe=int(nfe[row]),
                token_evals=int(evals[row]),
            )
        )
    return filled


def mask_name(tokenizer: Tokenizer) -> str:
    """How a text spells the mask."""
    names = tokenizer.special_tokens.items()
    return next((name for name, index in names if index == tokenizer.mask_id), SPECIAL_NAMES.mask)


def blanked_ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """The ids of a text with blanks. Nothing but the mask is read as a special token.

    Raises:
        ConfigError: it has no blank.
    """
    name = mask_name(tokenizer)
    parts = text.split(name)
    if len(parts) == 1:
        raise ConfigError(f"fill: prompt {text!r} has no blank; write {name} where one is")
    if _takes_space(tokenizer, name):
        parts[:-1] = [part.rstrip(" ") for part in parts[:-1]]
    mask = np.array([tokenizer.mask_id], np.int32)
    pieces = [np.array([tokenizer.bos_id], np.int32)] if tokenizer.adds_bos else []
    for number, ids in enumerate(tokenizer.encode_batch(parts)):
        pieces += [mask, ids] if number else [ids]
    if tokenizer.adds_eos:
        pieces.append(np.array([tokenizer.eos_id], np.int32))
    return np.concatenate(pieces)


def _takes_space(tokenizer: Tokenizer, name: str) -> bool:
    """True when the mask stands for a word with the space before it, as RoBERTa's does."""
    if tokenizer.kind not in ("bpe", "file"):
        return False
    added = json.loads(tokenizer.content).get("added_tokens") or []
    return any(token["content"] == name and token.get("lstrip") for token in added)
