"""Copying a text, and copying what matters of it."""

from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .draws import Bits, below, permutations
from .task import SyntheticTask, numbered


class CopyingConfig(SyntheticTask):
    """`a3 a0 a7 | a3 a0 a7`: a text and the same text again (Jelassi et al., arXiv 2402.01032).

    Transformers learn it and carry it over to longer texts; a recurrent state has to hold it all.

    Attributes:
        length: the level, symbols of text.
        alphabet: different symbols.
    """

    level_field: ClassVar[str] = "length"
    name: Literal["copying"] = "copying"
    length: int = Field(default=16, ge=1)
    alphabet: int = Field(default=16, ge=2)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The alphabet and the bar."""
        return (*numbered("a", self.alphabet), "|")

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The alphabet."""
        return tuple(range(self.alphabet))

    @property
    def prompt_length(self) -> int:
        """The text and the bar."""
        return self.length + 1

    @property
    def answer_length(self) -> int:
        """The text."""
        return self.length

    @property
    def draws(self) -> int:
        """The text."""
        return self.length

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        text = below(bits, self.alphabet)
        bar = np.full((len(bits), 1), self.alphabet)
        return np.concatenate([text, bar, text], axis=1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Everything up to the bar."""
        return np.array(prompt[:-1], np.int32)


class SelectiveCopyingConfig(SyntheticTask):
    """`_ a3 _ _ a0 _ | a3 a0`: copy the symbols and leave the blanks out (Mamba, sec. 4.1.1).

    Where the symbols stand is random, so what is stored has to depend on the input: a
    time-invariant recurrence cannot.

    Attributes:
        length: the level, symbols and blanks together.
        num_tokens: symbols to copy.
        alphabet: different symbols.
    """

    level_field: ClassVar[str] = "length"
    name: Literal["selective_copying"] = "selective_copying"
    length: int = Field(default=64, ge=1)
    num_tokens: int = Field(default=8, ge=1)
    alphabet: int = Field(default=16, ge=2)

    @model_validator(mode="after")
    def _symbols_fit(self) -> Self:
        shortest = self.length if self.min_level is None else self.min_level
        if self.num_tokens > shortest:
            raise ValueError(f"num_tokens={self.num_tokens} do not fit into length {shortest}")
        return self

    @property
    def symbols(self) -> tuple[str, ...]:
        """The alphabet, the blank, the bar."""
        return (*numbered("a", self.alphabet), "_", "|")

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The alphabet."""
        return tuple(range(self.alphabet))

    @property
    def prompt_length(self) -> int:
        """The text and the bar."""
        return self.length + 1

    @property
    def answer_length(self) -> int:
        """The symbols."""
        return self.num_tokens

    @property
    def draws(self) -> int:
        """Symbols and places."""
        return self.num_tokens + self.length

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        count = self.num_tokens
        symbols = below(bits[:, :count], self.alphabet)
        places = np.sort(permutations(bits[:, count:])[:, :count], axis=1)
        text = np.full((len(bits), self.length), self.alphabet)
        np.put_along_axis(text, places, symbols, axis=1)
        bar = np.full((len(bits), 1), self.alphabet + 1)
        return np.concatenate([text, bar, symbols], axis=1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """What is neither blank nor bar."""
        prompt = np.asarray(prompt)
        return prompt[prompt < self.alphabet].astype(np.int32)
