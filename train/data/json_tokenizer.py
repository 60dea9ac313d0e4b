"""Tokenizers in the `tokenizer.json` format: the one trained here, and any other from disk."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ...errors import DataError
from .tokenizer import SPECIAL_NAMES, SpecialIds, Tokenizer, describe_text, first_difference

# Under these names published tokenizers keep what we call BOS, EOS, PAD and MASK, likeliest first.
KNOWN_NAMES = SpecialIds(  # type: ignore[arg-type]
    bos=("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]"),
    eos=("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "[SEP]"),
    pad=("<|pad|>", "<pad>", "<|padding|>", "[PAD]"),
    mask=("<|mask|>", "<mask>", "<|mdm_mask|>", "[MASK]"),
)

# Text that normalisers, pre-tokenizers and unknown-token rules are known to change.
ROUND_TRIP_PROBES = (
    "",
    "Hello, world! It's 3.14 o'clock.",
    " leading",
    "  two  spaces  ",
    "tab\tand\r\nCRLF\n\n\nlines\n",
    "don 't . spaces , before ! punctuation",
    "caf\u00e9 cafe\u0301 \ufb01 \u2460 \u00a0 \u3000 \u200b",
    "nul \x00 and \x7f",
    "\u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f468\u200d\U0001f469",
    "UPPER lower",
    "<s>a</s>b<pad><|endoftext|>[MASK]",
    "\u2581 low line",
)


def train_bpe(texts: Iterable[str], vocab_size: int) -> "JsonTokenizer":
    """Trains byte-level BPE: all 256 bytes, then merges, then the four special tokens.

    The same texts give the same tokenizer on every machine.

    Args:
        texts: the training split.
        vocab_size: all ids, the 256 bytes and the 4 special ones included.

    Raises:
        DataError: the texts are too short for so many distinct pieces.
    """
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    wanted = vocab_size - len(SPECIAL_NAMES)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=wanted,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    got = library.get_vocab_size()
    if got != wanted:
        raise DataError(
            f"vocab_size {vocab_size} needs {wanted} text pieces, but the training text has only "
            f"{got}: lower vocab_size to at most {got + len(SPECIAL_NAMES)} or add text"
        )
    library.add_special_tokens(
        [tokenizers.AddedToken(str(name), special=True) for name in SPECIAL_NAMES]
    )
    return JsonTokenizer(library.to_str(), kind="bpe", origin="the trained tokenizer")


def read_json_tokenizer(path: Path, kind: str = "file") -> "JsonTokenizer":
    """Loads a `tokenizer.json`.

    Raises:
        DataError: the file is missing, no JSON, or no tokenizer.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"tokenizer {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"tokenizer {path}: not UTF-8 at byte {error.start}") from None
    return JsonTokenizer(text, kind=kind, origin=str(path))


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, decoded by our own table of bytes per id.

    Special tokens that the file lacks are appended after its vocabulary. Only added tokens that the
    file flags as special count as such, and encoding never produces them from plain text.

    The tokenizer of an imported checkpoint has an entry `genlab` beside those of the format, which
    says what the checkpoint's own files say: `specials`, the four ids; `stop_ids`, all that end an
    answer; `vocab_size`, the rows of the model; `adds_bos`, whether texts begin with BOS; and
    perhaps `adds_eos`, whether they end with EOS. Nothing is appended to it then: the model has no
    rows for it.
    """

    def __init__(self, text: str, *, kind: str, origin: str) -> None:
        """Parses the text of a `tokenizer.json`; `origin` names it in messages."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DataError(f"{origin}: no JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise DataError(f"{origin}: no tokenizer.json (it has no 'model')")
        own = data.get(OWN)
        # BPE dropout would make encoding random; padding and truncation would change the text.
        if data["model"].get("dropout") is not None:
            data["model"]["dropout"] = None
        data.update(truncation=None, padding=None)
        content = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        try:
            added = {token["content"]: bool(token["special"]) for token in _added_tokens(data)}
            hidden = _hidden_names(data)
            harmless = json.dumps(_renamed(data, hidden))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{origin}: not a valid tokenizer.json: {error!r}") from None
        try:
            library = tokenizers.Tokenizer.from_str(harmless)
        except Exception as error:  # the library raises bare Exception for a bad file
            reason = " ".join(str(error).split())
            raise DataError(f"{origin}: not a valid tokenizer.json: {reason}") from None
        library.encode_special_tokens = True
        self._library, self._library_behind = library, library
        if _first_alone(data.get("pre_tokenizer")):
            behind = json.loads(harmless)
            behind["pre_tokenizer"] = _without_first(behind["pre_tokenizer"])
            self._library_behind = tokenizers.Tokenizer.from_str(json.dumps(behind))
            self._library_behind.encode_special_tokens = True

        vocabulary = library.get_vocab(with_added_tokens=True)
        if own is not None:
            self._take_own(own, vocabulary, origin)
        special_tokens = {name: vocabulary[alias] for name, alias in hidden.items()}
        size = max(vocabulary.values(), default=-1) + 1
        size, ids = (size, []) if own is None else (own["vocab_size"], own["specials"])
        for known, own_name in zip(KNOWN_NAMES, SPECIAL_NAMES, strict=True) if not ids else ():
            found = [special_tokens[name] for name in known if name in special_tokens]
            if not found:
                found = [size]
                special_tokens[str(own_name)] = size
                size += 1
            ids.append(found[0])

        to_bytes = _piece_decoder(library, data.get("decoder"))
        pieces: list[bytes | None] = [None] * size
        for name, index in vocabulary.items():
            pieces[index] = name.encode() if name in added else to_bytes(name)
        for index in (*special_tokens.values(), *ids):
            pieces[index] = b""
        model = data["model"]
        unknown = special_tokens.get(model.get("unk_token"), model.get("unk_id"))
        self._control_ids = np.array(
            sorted(i for i in special_tokens.values() if i != unknown), np.int32
        )
        super().__init__(
            kind=kind,
            pieces=pieces,
            specials=SpecialIds(*ids),
            special_tokens=special_tokens,
            content=content,
            drops_first_space=_drops_first_space(library, to_bytes),
        )
        if own is not None:
            self.stop_ids, self.adds_bos = tuple(own["stop_ids"]), own["adds_bos"]
            self.adds_eos = own.get("adds_eos", False)
        changed = first_difference(self, ROUND_TRIP_PROBES)
        if changed is not None:
            normalizer = (data.get("normalizer") or {}).get("type")
            cause = f"normalizer {normalizer}" if normalizer else "no normalizer"
            self.lossy_reason = (
                f"{origin} does not give back {describe_text(changed)} byte for byte ({cause}): "
                "bits per byte still count the bytes of the original text"
            )

    @staticmethod
    def _take_own(own: Any, vocabulary: dict[str, int], origin: str) -> None:
        """Checks the entry of an imported tokenizer.

        Raises:
            DataError: it is malformed, or the vocabulary is larger than the model's.
        """
        if not isinstance(own, dict) or set(own) - {"adds_eos"} != OWN_KEYS:
            raise DataError(f"{origin}: its entry {OWN!r} wants {', '.join(sorted(OWN_KEYS))}")
        size, ids = own["vocab_size"], (*own["specials"], *own["stop_ids"])
        largest = max(vocabulary, key=vocabulary.__getitem__, default="")
        if vocabulary and vocabulary[largest] >= size:
            raise DataError(
                f"{origin}: wrong vocabulary: token {largest!r} has id {vocabulary[largest]}, but "
                f"the model has {size} ids"
            )
        bad = [i for i in ids if not isinstance(i, int) or not 0 <= i < size]
        if bad or len(own["specials"]) != len(SPECIAL_NAMES):
            raise DataError(f"{origin}: wrong special ids {list(ids)} for {size} ids")

    def _encode_plain(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return self._encode_by(self._library, texts)

    def _encode_behind(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return self._encode_by(self._library_behind, texts)

    def _encode_by(
        self, library: tokenizers.Tokenizer, texts: Sequence[str]
    ) -> list[NDArray[np.int32]]:
        encoded = library.encode_batch_fast(list(texts), add_special_tokens=False)
        out = [np.array(encoding.ids, np.int32) for encoding in encoded]
        for text, ids in zip(texts, out, strict=True):
            control = ids[np.isin(ids, self._control_ids)]
            if control.size:
                raise DataError(
                    f"the tokenizer turns the plain text {describe_text(text)} into the special "
                    f"id {int(control[0])}"
                )
        return out


OWN, OWN_KEYS = "genlab", {"specials", "stop_ids", "vocab_size", "adds_bos"}


def _added_tokens(data: dict[str, Any]) -> list[dict[str, Any]]:
    return data.get("added_tokens") or []


def _hidden_names(data: dict[str, Any]) -> dict[str, str]:
    """Returns for each special token a name that no text spells."""
    special = [token["content"] for token in _added_tokens(data) if token["special"]]
    return {name: f"\U0010fffd{number}\U0010fffd" for number, name in enumerate(special)}


def _renamed(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns a tokenizer.json with its special tokens renamed.

    Otherwise a model that holds them as pieces (Unigram, WordLevel) would find "</s>" in a text,
    and added tokens that swallow the spaces around them would change it.
    """
    model = dict(data["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in _added_tokens(data)
    ]
    known = {key: value for key, value in data.items() if key != OWN}
    return {**known, "model": model, "added_tokens": added, "post_processor": None}


def _first_alone(step: Any) -> bool:
    """Whether a pre-tokenizer puts a space before the beginning of a text and nowhere else."""
    if not isinstance(step, dict):
        return False
    parts = step.get("pretokenizers") or []
    return step.get("prepend_scheme") == "first" or any(map(_first_alone, parts))


def _without_first(step: dict[str, Any]) -> dict[str, Any]:
    """The same pre-tokenizer for a text that stands behind something else."""
    parts = {"pretokenizers": [_without_first(part) for part in step.get("pretokenizers", ())]}
    own = {"prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else {}
    return step | own | (parts if "pretokenizers" in step else {})


def _byte_alphabet() -> dict[str, int]:
    """Returns the printable stand-in of each byte in byte-level vocabularies (GPT-2).

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = (_decoder_types(d) for d in decoder.get("decoders", ()))
    return {decoder["type"]}.union(*inner)


def _join_pieces(library: tokenizers.Tokenizer, pieces: list[str]) -> str:
    decoder = library.decoder
    return " ".join(pieces) if decoder is None else decoder.decode(pieces)


def _piece_decoder(library: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> Any:
    """Returns a function from a piece's name to the bytes that it adds in the middle of a text."""
    types = _decoder_types(decoder)
    if "ByteLevel" in types:
        alphabet = _byte_alphabet()

        def from_alphabet(name: str) -> bytes:
            if all(c in alphabet for c in name):
                return bytes(alphabet[c] for c in name)
            return name.encode()

        return from_alphabet
    one, two = _join_pieces(library, ["a"]), _join_pieces(library, ["a", "a"])
    tail = len(two) - len(one)

    def by_probing(name: str) -> bytes:
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name) if "ByteFallback" in types else None
        if byte:
            return bytes([int(byte[1], 16)])
        text = _join_pieces(library, ["a", name, "a"])
        return text[len(one) : len(text) - tail].encode()

    return by_probing


def _drops_first_space(library: tokenizers.Tokenizer, to_bytes: Any) -> bool:
    """True when a piece begins with a space everywhere but at the start of the text."""
    return any(
        to_bytes(piece).startswith(b" ") and not _join_pieces(library, [piece]).startswith(" ")
        for piece in ("\u2581a", "a")  # SentencePiece, WordPiece
    )
