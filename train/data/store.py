"""The tokens of one split, as the packer and the evaluation see them."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from .tokenizer import SpecialIds


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents as one long array of ids, usually memory-mapped.

    Attributes:
        tokens: uint16 or uint32 [tokens], the documents in order without BOS and EOS.
        offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].
        byte_counts: int64 [documents], the exact UTF-8 bytes of each document's text.
        names: the documents' ids.
        specials: the tokenizer's special ids.
        split: `train`, `validation` or `test`, for messages.
    """

    tokens: NDArray
    offsets: NDArray[np.int64]
    byte_counts: NDArray[np.int64]
    names: tuple[str, ...]
    specials: SpecialIds
    split: str = "train"

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of text, without BOS and EOS."""
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return int(self.byte_counts.sum())

    def document(self, index: int) -> NDArray[np.int32]:
        """Returns the ids of one document, int32."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)
