"""The tokenizer of a published checkpoint, with the ids and habits that its files spread out.

`tokenizer.json` holds the vocabulary; where there is none, GPT-2's two files or SentencePiece's
`tokenizer.model`. Which ids begin, end and fill texts stands in `tokenizer_config.json`,
`generation_config.json` and `config.json`, in that order of trust for begin and padding, and with
generation first for what ends an answer, as transformers has it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ...errors import CheckpointError, DataError
from ..data.json_tokenizer import KNOWN_NAMES, OWN, JsonTokenizer
from ..data.symbols_tokenizer import SymbolsTokenizer
from ..data.tokenizer import SpecialIds, Tokenizer
from .hf_config import HFConfig, read_json
from .sentencepiece import read_model, vocabulary_of

VOCABULARY, SETTINGS, GENERATION, SPECIALS = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
)  # fmt: skip
PIECES, ADDED = "tokenizer.model", "added_tokens.json"
# Files that travel with the run, so that an export gives them back.
KEPT = (
    "config.json", VOCABULARY, SETTINGS, GENERATION, SPECIALS, "vocab.json",
    "merges.txt", ADDED, PIECES, "chat_template.jinja",
)  # fmt: skip


class Imported(NamedTuple):
    """A tokenizer, and what the user should know about it.

    Attributes:
        tokenizer: with as many ids as the model has rows.
        note: one line, or None.
    """

    tokenizer: Tokenizer
    note: str | None


class TokenizerFiles(NamedTuple):
    """What a checkpoint says of its tokenizer.

    Attributes:
        where: it comes from, for messages.
        vocabulary: the parsed `tokenizer.json`, or what the other files amount to; None where there
            is none.
        settings: of `tokenizer_config.json`; where that names no token, `special_tokens_map.json`.
        generation: of `generation_config.json`.
    """

    where: Path
    vocabulary: dict[str, Any] | None
    settings: dict[str, Any]
    generation: dict[str, Any]


def read_files(folder: Path) -> TokenizerFiles:
    """Reads a checkpoint folder's files.

    Raises:
        DataError: the vocabulary is damaged or of a kind that is not read.
        CheckpointError: a settings file is unreadable.
    """
    settings, generation, specials = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in (SETTINGS, GENERATION, SPECIALS)
    )
    settings = specials | settings
    vocabulary = _vocabulary(folder)
    if vocabulary is None and (folder / PIECES).exists():
        model = read_model(folder / PIECES)
        vocabulary = vocabulary_of(model.pieces, _added_tokens(folder, settings))
        settings = model.settings | settings
    return TokenizerFiles(folder, vocabulary, settings, generation)


def import_tokenizer(
    files: TokenizerFiles, config: HFConfig, vocab_size: int, *, masked: bool = False
) -> Imported:
    """Makes a checkpoint's tokenizer.

    Args:
        files: what the checkpoint says of it.
        config: its `config.json`.
        vocab_size: rows of the model's embedding.
        masked: the model is one that fills masks, so it must have one.

    Raises:
        DataError: a file is damaged, names tokens that do not exist, or has more ids than the
            model has rows.
    """
    folder, data, settings, generation = files
    if data is None:
        ids = _special_ids(config.raw, settings, generation, None, folder, vocab_size, masked)
        symbols = [str(index) for index in range(vocab_size)]
        note = f"{folder} has no {VOCABULARY}: texts are written as ids, such as '5 17 3'"
        return Imported(SymbolsTokenizer(symbols, specials=ids.specials), note)
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises bare Exception for a bad file
        reason = " ".join(str(error).split())
        raise DataError(f"{folder / VOCABULARY}: not a valid tokenizer.json: {reason}") from None
    ids = _special_ids(config.raw, settings, generation, library, folder, vocab_size, masked)
    whole = library.encode("a").ids
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = whole[:1] == [ids.specials.bos]
    # A copy: the caller keeps the published file beside the run.
    data = dict(data)
    data[OWN] = {
        "specials": list(ids.specials),
        "stop_ids": ids.stop_ids,
        "vocab_size": vocab_size,
        "adds_bos": adds_bos,
    }
    if masked:  # others begin texts that the model is to go on with
        data[OWN]["adds_eos"] = whole[-1:] == [ids.specials.eos]
    tokenizer = JsonTokenizer(json.dumps(data), kind="file", origin=str(folder / VOCABULARY))
    return Imported(tokenizer, tokenizer.lossy_reason)


_OF_MASKED = {"bos": "cls", "eos": "sep"}


class _Ids(NamedTuple):
    specials: SpecialIds
    stop_ids: list[int]


def _special_ids(
    config: dict[str, Any],
    settings: dict[str, Any],
    generation: dict[str, Any],
    library: tokenizers.Tokenizer | None,
    folder: Path,
    vocab_size: int,
    masked: bool,
) -> _Ids:
    def from_settings(role: str) -> int | None:
        token = settings.get(f"{role}_token")
        if token is None and masked and role in _OF_MASKED:  # BERT's names
            token = settings.get(f"{_OF_MASKED[role]}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None or library is None:
            return None
        index = library.token_to_id(token)
        if index is None:
            raise DataError(f"{folder}: {role}_token {token!r} is not in {VOCABULARY}")
        return index

    def listed(values: dict[str, Any], role: str) -> list[int]:
        value = values.get(f"{role}_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        for index in found:
            if isinstance(index, bool) or not isinstance(index, int):
                raise DataError(f"{folder}: {role}_token_id is {index!r}, want an id")
        # -1 and ids beyond the rows stand for "none" in some published configs.
        return [index for index in found if 0 <= index < vocab_size]

    def one(role: str) -> int | None:
        named = from_settings(role)
        if named is not None:
            return named
        found = next(iter(listed(config, role) + listed(generation, role)), None)
        return by_name(role) if found is None and masked else found

    def by_name(role: str) -> int | None:
        """By the names that such a token usually has: early BERT files say no more."""
        if library is None:
            return None
        ids = map(library.token_to_id, getattr(KNOWN_NAMES, role))
        return next((index for index in ids if index is not None), None)

    stops = listed(generation, "eos") or listed(config, "eos")
    named = from_settings("eos")
    if not stops and named is None and masked:
        named = by_name("eos")
    if not stops and named is not None:
        stops = [named]
    bos, pad, mask = one("bos"), one("pad"), one("mask")
    if masked and mask is None:
        raise DataError(
            f"{folder}: no file says which token is the mask, which this model needs; want "
            f"mask_token in {SETTINGS} or mask_token_id in config.json"
        )
    eos = stops[0] if stops else bos if bos is not None else 0
    # A model without such an id never meets it; EOS is one that is no text.
    first = eos if bos is None else bos
    specials = SpecialIds(first, eos, eos if pad is None else pad, eos if mask is None else mask)
    return _Ids(specials, stops or [eos])


def _vocabulary(folder: Path) -> dict[str, Any] | None:
    """The parsed `tokenizer.json`, made from GPT-2's two files where there is none."""
    path = folder / VOCABULARY
    if path.exists():
        try:
            return read_json(path)
        except CheckpointError as error:
            raise DataError(str(error)) from None
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.exists() and merges.exists():
        try:
            model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:  # the library raises bare Exception for a bad file
            reason = " ".join(str(error).split())
            raise DataError(f"{folder}: vocab.json and merges.txt do not fit: {reason}") from None
        library = tokenizers.Tokenizer(model)
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        end = "<|endoftext|>"
        if library.token_to_id(end) is not None:
            library.add_special_tokens([tokenizers.AddedToken(end, special=True)])
        return dict(json.loads(library.to_str()))
    return None


def _added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Tokens beside the pieces of a `tokenizer.model`, by id."""
    listed = read_json(folder / ADDED) if (folder / ADDED).exists() else {}
    found: dict[Any, Any] = {index: {"content": text} for text, index in listed.items()}
    decoder = settings.get("added_tokens_decoder") or {}
    if isinstance(decoder, dict):
        for index, values in decoder.items():
            found[int(index) if str(index).isdecimal() else index] = values
    for index, values in found.items():
        if type(index) is not int or not isinstance(values, dict):
            raise DataError(f"{folder}: added token {index!r} is {values!r}, want an id and a text")
    return found
