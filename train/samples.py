"""Short texts from a model in training, to look at."""

import json
from pathlib import Path

import numpy as np

from ..paradigms.decoding.loop import advance
from ..paradigms.decoding.registry import default_decoding
from ..paradigms.decoding.sampling import make_sampling
from ..paradigms.interface import Paradigm, SpecialIds
from ..paradigms.model import Model
from .config import RunConfig
from .data.tokenizer import Tokenizer
from .files import write_text
from .metrics import read_records

COUNT = 2
NEW_TOKENS = 64


def sample(
    model: Model, paradigm: Paradigm, tokenizer: Tokenizer, config: RunConfig
) -> list[str]:
    """Draws texts from BOS alone at temperature 1, the same draws each time.

    Args:
        model: float32 parameters.
        paradigm: picks the decoding.
        tokenizer: of the run.
        config: of the run.
    """
    specials = SpecialIds(*tokenizer.specials)
    decoding = default_decoding(paradigm.name).build(specials, paradigm)
    new = min(NEW_TOKENS, model.config.max_len - 1)
    forbidden = {specials.bos, specials.pad, specials.mask, *tokenizer.unused_ids().tolist()}
    sampling = make_sampling(
        COUNT,
        vocab_size=model.config.padded_vocab_size,
        steps=new if decoding.uses_steps else 0,
        forbidden_ids=[
            *sorted(forbidden - {specials.eos}),
            *range(tokenizer.vocab_size, model.config.padded_vocab_size),
        ],
        stop_ids=[specials.eos],
    )
    ready = model.prepare(config.training.compute_dtype)
    state = decoding.start(
        ready,
        np.full((COUNT, 1), specials.bos, np.int32),
        lengths=np.ones((COUNT,), np.int32),
        sampling=sampling,
        seeds=config.seed + np.arange(COUNT),
        max_new=np.full((COUNT,), new, np.int32),
        max_len=new + 1,
    )
    state = advance(ready, decoding, state, 2 * new)
    texts = []
    for row in np.asarray(state.tokens):
        text = row[1 : new + 1].tolist()
        if specials.eos in text:
            text = text[: text.index(specials.eos)]
        texts.append(tokenizer.decode_bytes(text).decode("utf-8", errors="replace"))
    return texts


def write_samples(
    path: Path,
    model: Model,
    paradigm: Paradigm,
    tokenizer: Tokenizer,
    config: RunConfig,
    step: int,
) -> None:
    """Adds texts after update `step` to a JSONL file; lines of that and later updates are dropped.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    lines = [record for record in read_records(path) if record["step"] < step]
    lines.append({"step": step, "samples": sample(model, paradigm, tokenizer, config)})
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
