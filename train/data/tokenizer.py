"""What every tokenizer can do, and the simplest one: bytes.

A tokenizer is a table from ids to bytes plus a way to encode. Decoding joins table entries, so it
is exact, and a stream of ids decodes to the same text as all of them at once. Four special ids
belong to every tokenizer, so that all model families share one vocabulary:

    BOS   starts every row and every document
    EOS   ends a document
    PAD   fills rows, never scored
    MASK  the hidden token of masked diffusion
"""

import abc
import codecs
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import DataError
from ...paradigms.interface import SpecialIds

FORMAT = "genlab-tokenizer-1"


SPECIAL_NAMES = SpecialIds("<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>")  # type: ignore[arg-type]


def utf8(text: str) -> bytes:
    """Returns the text's UTF-8 bytes.

    Raises:
        DataError: not a string, or one with a lone surrogate, which has no UTF-8 form.
    """
    if not isinstance(text, str):
        raise DataError(f"a tokenizer encodes str, got {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which UTF-8 cannot express"
        ) from None


class StreamingDecoder:
    """Turns ids into text piece by piece, never emitting part of a character.

    The pieces of `push` and the last one of `flush` join to exactly `decode` of all ids. Bytes that
    are no UTF-8 become U+FFFD, as in `decode`.
    """

    def __init__(self, tokenizer: "Tokenizer", *, continuing: bool) -> None:
        """Use `Tokenizer.streaming_decoder`."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.drops_first_space and not continuing

    def push(self, ids: ArrayLike) -> str:
        """Returns the text that became complete with these ids (one id or several)."""
        data = self._tokenizer.join(ids)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Returns what is still held: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
        kind: `bytes`, `bpe`, `file` or `symbols`.
        vocab_size: number of ids, special ones included. A model may pad its vocabulary up beyond
            this; the padded ids are no tokens and are refused here.
        specials: the ids of BOS, EOS, PAD and MASK; also `bos_id`, `eos_id`, `pad_id`, `mask_id`.
        special_tokens: the text form of each special id, for showing and for `allow_special`.
        content: what defines the tokenizer, as text; `fingerprint` is its SHA-256.
        drops_first_space: True when decoding drops one space at the very start, because encoding
            added it there (SentencePiece).
        lossy_reason: None, or why some text does not survive `decode(encode(text))`.
        stop_ids: the ids that end an answer; EOS and, in some imported checkpoints, others.
        adds_bos: False for imported checkpoints whose texts do not begin with BOS.
        adds_eos: True for imported checkpoints whose texts, when they are whole, end with EOS.
    """

    def __init__(
        self,
        *,
        kind: str,
        pieces: Sequence[bytes | None],
        specials: SpecialIds,
        special_tokens: Mapping[str, int],
        content: str,
        drops_first_space: bool = False,
    ) -> None:
        """Takes the table `pieces`: each id's bytes, b"" for special ids, None for no token."""
        self.kind = kind
        self.vocab_size = len(pieces)
        self.specials = specials
        self.bos_id, self.eos_id, self.pad_id, self.mask_id = specials
        self.special_tokens = dict(special_tokens)
        self.content = content
        self.drops_first_space = drops_first_space
        self.lossy_reason: str | None = None
        self.stop_ids: tuple[int, ...] = (specials.eos,)
        self.adds_bos, self.adds_eos = True, False
        self._pieces = list(pieces)
        names = sorted(self.special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")

    @abc.abstractmethod
    def _encode_plain(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encodes texts in which special tokens have no meaning."""

    def _encode_behind(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Likewise, of texts that stand behind something else."""
        return self._encode_plain(texts)

    @property
    def lossy(self) -> bool:
        """True when some text is not given back byte for byte."""
        return self.lossy_reason is not None

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the content: equal fingerprint, equal ids for every text."""
        return hashlib.sha256(f"{FORMAT}\n{self.content}".encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> NDArray[np.int32]:
        """Returns the ids of a text, without BOS and EOS.

        Args:
            text: any string; "" gives no ids.
            allow_special: read the names in `special_tokens` (such as `<|eos|>`) as special ids.
                Off by default: what a user types never becomes a control token.

        Raises:
            DataError: the text has a lone surrogate.
        """
        if not allow_special:
            return self.encode_batch([text])[0]
        parts = self._special_pattern.split(text)
        plain = self.encode_between(parts[0::2])
        out = [plain[0]]
        for name, ids in zip(parts[1::2], plain[1:], strict=True):
            out += [np.array([self.special_tokens[name]], np.int32), ids]
        return np.concatenate(out)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encodes several texts, in parallel where the tokenizer can; specials stay plain text."""
        for text in texts:
            utf8(text)
        return self._encode_plain(texts)

    def encode_between(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encodes the plain texts before, between and behind the special tokens of one text."""
        for text in texts:
            utf8(text)
        return [*self._encode_plain(texts[:1]), *self._encode_behind(texts[1:])]

    def join(self, ids: ArrayLike) -> bytes:
        """Returns the bytes of the ids in a row, special ids as nothing.

        Raises:
            DataError: an id is outside the vocabulary, names no token or is no integer.
        """
        array = np.atleast_1d(np.asarray(ids))
        if array.size == 0:
            return b""
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise DataError(
                f"token ids must be a list of integers, got {array.dtype} of shape {array.shape}"
            )
        wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"token id {int(array[at])} at position {at} is outside the vocabulary of "
                f"{self.vocab_size} ids (0 to {self.vocab_size - 1})"
            )
        try:
            return b"".join(map(self._pieces.__getitem__, array.tolist()))  # type: ignore[arg-type]
        except TypeError:
            hole = next(i for i in array.tolist() if self._pieces[i] is None)
            raise DataError(f"token id {hole} names no token in this tokenizer") from None

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Returns the exact bytes of the ids; special ids give nothing.

        Raises:
            DataError: an id is outside the vocabulary or no integer.
        """
        data = self.join(ids)
        return data.removeprefix(b" ") if self.drops_first_space else data

    def decode(self, ids: ArrayLike) -> str:
        """Like `decode_bytes`, as text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def streaming_decoder(self, *, continuing: bool = False) -> StreamingDecoder:
        """Returns a decoder for a stream of ids; `continuing` when text stands before its first."""
        return StreamingDecoder(self, continuing=continuing)

    def byte_lengths(self) -> NDArray[np.int32]:
        """Returns int32 [V]: the bytes of text that each id stands for, 0 for special ids."""
        return np.array([len(piece or b"") for piece in self._pieces], np.int32)

    def unused_ids(self) -> NDArray[np.int32]:
        """Returns the ids that name no token: decoding refuses them, so nothing may draw them."""
        holes = [index for index, piece in enumerate(self._pieces) if piece is None]
        return np.array(holes, np.int32)


class BytesTokenizer(Tokenizer):
    """One id per byte: 0 to 255, then BOS, EOS, PAD, MASK."""

    def __init__(self) -> None:
        """Has no settings."""
        specials = SpecialIds(256, 257, 258, 259)
        super().__init__(
            kind="bytes",
            pieces=[bytes([b]) for b in range(256)] + [b""] * 4,
            specials=specials,
            special_tokens=dict(zip(SPECIAL_NAMES, specials, strict=True)),  # type: ignore[arg-type]
            content="bytes",
        )

    def _encode_plain(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.frombuffer(utf8(text), np.uint8).astype(np.int32) for text in texts]


def describe_text(text: str, limit: int = 40) -> str:
    """Returns the text on one line, quoted and shortened, for messages."""
    shown = ascii(text)
    return shown if len(shown) <= limit else shown[: limit - 4] + "...'"


def first_difference(tokenizer: Tokenizer, texts: Iterable[str]) -> str | None:
    """Returns the first text that `decode(encode(text))` does not give back, or None."""
    for text in texts:
        if tokenizer.decode_bytes(tokenizer.encode(text)) != utf8(text):
            return text
    return None
