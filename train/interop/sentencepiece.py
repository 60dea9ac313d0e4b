"""SentencePiece vocabularies as `tokenizer.json`: from `tokenizer.model`, or from a GGUF file.

`tokenizer.model` is a Protocol Buffers message (sentencepiece_model.proto), of which a few fields
matter; a reader of those is shorter than what the package would have to be told.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ...errors import DataError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
UNIGRAM, BPE = 1, 2  # kinds of models
SPACE = "\u2581"


class Pieces(NamedTuple):
    """A vocabulary, and how texts are prepared for it.

    Attributes:
        where: it comes from, for messages.
        kind: UNIGRAM or BPE.
        texts: of the pieces, by id.
        scores: likewise; the higher, the earlier a merge, or the likelier a piece.
        types: likewise, NORMAL to BYTE.
        byte_fallback: unknown characters become the pieces of their bytes.
        first_space: a text begins with a space that it does not have.
        squeeze: spaces at either end are dropped, several become one.
        charsmap: which characters become which others; empty if none do.
        bos: id that texts begin with, None for none.
    """

    where: Path
    kind: int
    texts: list[str]
    scores: list[float]
    types: list[int]
    byte_fallback: bool
    first_space: bool
    squeeze: bool
    charsmap: bytes
    bos: int | None


class Model(NamedTuple):
    """What `tokenizer.model` says.

    Attributes:
        pieces: the vocabulary.
        settings: names of its special tokens, as `tokenizer_config.json` would have them.
    """

    pieces: Pieces
    settings: dict[str, Any]


def read_model(path: Path) -> Model:
    """Reads a `tokenizer.model`.

    Raises:
        DataError: it is damaged, or of a kind that is not implemented.
    """
    try:
        top = list(_fields(path.read_bytes()))
        trainer, normalizer = (_merged(top, number) for number in (2, 3))
        pieces = [dict(_fields(value)) for number, value in top if number == 1]
        texts = [piece[1].decode("utf-8") for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, struct.error):
        raise DataError(
            f"{path}: no SentencePiece model, or damaged; save the tokenizer once with "
            "transformers' AutoTokenizer, which writes tokenizer.json"
        ) from None
    types = [piece.get(3, NORMAL) for piece in pieces]
    kind = trainer.get(3, UNIGRAM)
    if not texts or kind not in (UNIGRAM, BPE):
        what = {3: "words", 4: "characters"}.get(kind, kind)
        raise DataError(f"{path}: a SentencePiece model of {what}; want one of unigrams or BPE")
    refused = {
        "treat_whitespace_as_suffix": trainer.get(24, 0),
        "escape_whitespaces (off)": not normalizer.get(5, 1),
        "denormalizer_spec": any(number == 5 and value for number, value in top),
    }
    for name, found in refused.items():
        if found:
            raise DataError(f"{path}: {name} is not implemented")
    # Proto2's defaults. Negative ids stand as 64-bit two's complement and mean "none".
    roles = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
    ids = {role: trainer.get(field, default) for role, (field, default) in roles.items()}
    ids = {role: index for role, index in ids.items() if 0 <= index < len(texts)}
    bos = ids.get("bos")
    found = Pieces(
        path, kind, texts, scores, types,
        byte_fallback=bool(trainer.get(35, 0)),
        first_space=bool(normalizer.get(3, 1)),
        squeeze=bool(normalizer.get(4, 1)),
        charsmap=normalizer.get(2, b""),
        bos=bos,
    )  # fmt: skip
    return Model(found, {f"{role}_token": texts[index] for role, index in ids.items()})


def vocabulary_of(pieces: Pieces, added: dict[int, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The `tokenizer.json` of a vocabulary.

    It encodes as SentencePiece does, but for what follows a user-defined piece: with `first_space`
    that begins with a space again, as in transformers and llama.cpp.

    Args:
        pieces: the vocabulary.
        added: tokens by id, with the keys of `added_tokens_decoder`: further ones, which follow
            the pieces without a gap, and other properties of some.

    Raises:
        DataError: it has something that is not implemented, or `added` leaves a gap.
    """
    vocab = {text: index for index, text in enumerate(pieces.texts)}
    if len(vocab) < len(pieces.texts):
        raise DataError(f"{pieces.where}: a piece occurs twice in the vocabulary")
    unknown = pieces.types.index(UNKNOWN) if UNKNOWN in pieces.types else None
    if pieces.kind == BPE:
        model: Any = tokenizers.models.BPE(
            vocab=vocab,
            merges=_merges(pieces),
            unk_token=None if unknown is None else pieces.texts[unknown],
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
        )
    else:
        _check_unigram(pieces, unknown)
        scored = list(zip(pieces.texts, pieces.scores, strict=True))
        model = tokenizers.models.Unigram(scored, unk_id=unknown, byte_fallback=False)
    library = tokenizers.Tokenizer(model)
    normal, decode = tokenizers.normalizers, tokenizers.decoders
    steps = [normal.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.squeeze:
        steps += [
            normal.Replace(tokenizers.Regex(r"\A +| +\z"), ""),
            normal.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if pieces.first_space:
        steps.append(normal.Prepend(SPACE))
    library.normalizer = normal.Sequence([*steps, normal.Replace(" ", SPACE)])
    undo = [decode.Replace(SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    library.decoder = decode.Sequence(undo + [decode.Strip(" ", 1, 0)] * pieces.first_space)
    own = {
        index: {"content": text, "special": kind != USER_DEFINED}
        for index, (text, kind) in enumerate(zip(pieces.texts, pieces.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    }
    tokens = own | (added or {})
    for index in sorted(tokens):
        token = _added_token(pieces.where, tokens[index])
        library.add_special_tokens([token]) if token.special else library.add_tokens([token])
        if library.token_to_id(token.content) != index:
            raise DataError(
                f"{pieces.where}: added token {token.content!r} has id {index}; want "
                f"{library.token_to_id(token.content)}"
            )
    if pieces.bos is not None:
        name = pieces.texts[pieces.bos]
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=[name, "$A"], pair=None, special_tokens=[(name, pieces.bos)]
        )
    return dict(json.loads(library.to_str()))


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Pairs in the order in which SentencePiece would merge them: by the score of the whole."""
    merged = [(text, i) for i, text in enumerate(pieces.texts) if pieces.types[i] == NORMAL]
    known = dict(merged)
    found = []
    for text, index in merged:
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        pairs.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
        found += [(-pieces.scores[index], index, pair) for pair in pairs]
    for text, kind in zip(pieces.texts, pieces.types, strict=True):
        # SentencePiece merges such a piece and takes it apart again.
        if kind == UNUSED and any(
            text[:cut] in known and text[cut:] in known for cut in range(1, len(text))
        ):
            raise DataError(f"{pieces.where}: unused piece {text!r} is not implemented")
    return [pair for _, _, pair in sorted(found, key=lambda entry: entry[:2])]


def _check_unigram(pieces: Pieces, unknown: int | None) -> None:
    if unknown is None:
        raise DataError(f"{pieces.where}: its vocabulary has no unknown piece")
    # The library would find both in a text; SentencePiece does not.
    for kind, what in ((UNUSED, "unused"), (BYTE, "byte")):
        if kind in pieces.types:
            name = pieces.texts[pieces.types.index(kind)]
            raise DataError(
                f"{pieces.where}: {what} piece {name!r} in a model of unigrams is not implemented"
            )


def _added_token(where: Path, values: dict[str, Any]) -> tokenizers.AddedToken:
    known = ("special", "single_word", "lstrip", "rstrip")
    content = values.get("content")
    if not isinstance(content, str) or not content:
        raise DataError(f"{where}: an added token has content {content!r}, want a text")
    flags = {name: bool(values[name]) for name in known if name in values}
    return tokenizers.AddedToken(content, normalized=False, **flags)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: int, or bytes for all that is not a varint.

    Raises:
        ValueError: it is no such message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            value = varint()
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        sizes = {1: 8, 5: 4}
        size = varint() if wire == 2 else sizes.get(wire, -1)
        if size < 0 or at + size > len(data):
            raise ValueError
        yield number, data[at : at + size]
        at += size


def _merged(fields: list[tuple[int, Any]], number: int) -> dict[int, Any]:
    """The last value of each field of a message; several messages count as one."""
    return {k: v for own, value in fields if own == number for k, v in _fields(value)}
