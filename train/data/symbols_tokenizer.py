"""The tokenizer of synthetic tasks: one id per symbol, shown as words with spaces between them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, suggest
from .tokenizer import SPECIAL_NAMES, SpecialIds, Tokenizer


class SymbolsTokenizer(Tokenizer):
    """Ids 0 to S - 1 for the symbols in order, then BOS, EOS, PAD, MASK.

    An imported model without a tokenizer shows its ids as such words; its special ids are some of
    them then, and nothing is appended.
    """

    def __init__(self, symbols: Sequence[str], *, specials: SpecialIds | None = None) -> None:
        """Takes the words, none twice, and the special ids if they are among the words.

        Raises:
            DataError: no word, one twice, or one that is empty or has white space in it.
        """
        words = list(symbols)
        for word in words:
            if not isinstance(word, str) or not word or word.split() != [word]:
                raise DataError(f"symbol {word!r}: want a word without white space")
        if not words or len(set(words)) != len(words):
            raise DataError(f"want different symbols, at least one; got {len(words)} words, "
                            f"{len(set(words))} of them different")  # fmt: skip
        count = len(words)
        pieces = [f" {word}".encode() for word in words]
        content: dict[str, Any] = {"symbols": words}
        if specials is None:
            specials = SpecialIds(count, count + 1, count + 2, count + 3)
            pieces += [b""] * 4
        else:
            content["specials"] = list(specials)
            for index in specials:
                pieces[index] = b""
        super().__init__(
            kind="symbols",
            pieces=pieces,
            specials=specials,
            special_tokens=dict(zip(SPECIAL_NAMES, specials, strict=True)),  # type: ignore[arg-type]
            content=json.dumps(content),
            drops_first_space=True,
        )
        self.lossy_reason = "words are taken apart at white space and shown with one space"
        self._ids = {word: number for number, word in enumerate(words)}

    def _encode_plain(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array([self._id(word) for word in text.split()], np.int32) for text in texts]

    def _id(self, word: str) -> int:
        if word not in self._ids:
            hint = suggest(word, self._ids)
            if "did you mean" not in hint and len(self._ids) > 20:
                hint = f"; there are {len(self._ids)}, such as {next(iter(self._ids))!r}"
            raise DataError(f"no symbol {word!r} in this task{hint}")
        return self._ids[word]


def read_symbols(content: str, where: str) -> SymbolsTokenizer:
    """Makes the tokenizer from the content that was saved of it.

    Raises:
        DataError: it is not that.
    """
    try:
        data = json.loads(content)
        symbols, specials = data["symbols"], data.get("specials")
        specials = None if specials is None else SpecialIds(*map(int, specials))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{where} is corrupt: not a list of symbols") from None
    if not isinstance(symbols, list):
        raise DataError(f"{where} is corrupt: not a list of symbols")
    return SymbolsTokenizer(symbols, specials=specials)
