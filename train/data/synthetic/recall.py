"""Recall: find again what was said once. MQAR, induction, a needle in a haystack."""

import itertools
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .draws import Bits, below, permutations
from .task import Shortcut, SyntheticTask, numbered


def _one_of_the_values(pairs: int, num_values: int) -> float:
    """The right one is drawn from `pairs` values, or another one happens to be equal."""
    return 1 / pairs + (1 - 1 / pairs) / num_values


def _looked_up(
    pairs: dict[int, int], asked: int, known: str, symbols: tuple[str, ...]
) -> NDArray[np.int32]:
    if asked not in pairs:
        raise ValueError(f"{known} {symbols[asked]!r} is asked for, but never given")
    return np.array([pairs[asked]], np.int32)


class MQARConfig(SyntheticTask):
    """Multi-query associative recall (Zoology, arXiv 2312.04927).

    `k7 v3 k1 v9 ... k1 v9 k7 v3`: pairs of distinct keys with values, then some of the keys again,
    each to be followed by its value. Training rows ask many times, an example once. Queries are
    drawn independently: if each key were asked once, "a value not yet used" would be a shortcut
    that delays learning. Attention solves it at any width; a recurrent state must hold every pair.

    Attributes:
        num_pairs: the level.
        num_keys: keys to choose from.
        num_values: values to choose from, with repetition.
        queries: of a training row; null for as many as pairs.
    """

    level_field: ClassVar[str] = "num_pairs"
    name: Literal["mqar"] = "mqar"
    num_pairs: int = Field(default=8, ge=1)
    num_keys: int = Field(default=64, ge=1)
    num_values: int = Field(default=64, ge=2)
    queries: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _keys_suffice(self) -> Self:
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"num_pairs={self.num_pairs} needs as many different keys, num_keys is "
                f"{self.num_keys}"
            )
        return self

    @property
    def symbols(self) -> tuple[str, ...]:
        """Keys, then values."""
        return numbered("k", self.num_keys) + numbered("v", self.num_values)

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The values."""
        return tuple(range(self.num_keys, self.num_keys + self.num_values))

    @property
    def asked(self) -> int:
        """Queries of a training row at this level."""
        return self.queries or self.num_pairs

    @property
    def prompt_length(self) -> int:
        """The pairs and the first query."""
        return 2 * self.num_pairs + 1

    @property
    def answer_length(self) -> int:
        """From the first value on; one symbol in an example."""
        return 2 * self.asked - 1

    @property
    def scored(self) -> NDArray[np.bool_]:
        """The values behind queries."""
        place = np.arange(self.row_length)
        return (place >= 2 * self.num_pairs) & (place % 2 == 1)

    @property
    def graded(self) -> int:
        """One value: examples have a single query."""
        return 1

    @property
    def identity(self) -> slice:
        """The pairs, whatever is asked of them."""
        return slice(0, 2 * self.num_pairs)

    @property
    def shortcut(self) -> Shortcut:
        """Any value of the prompt."""
        return Shortcut("any value", _one_of_the_values(self.num_pairs, self.num_values))

    @property
    def draws(self) -> int:
        """Keys, values and queries."""
        return self.num_keys + self.num_pairs + self.asked

    def as_examples(self) -> Self:
        """One query."""
        return self.at_level(self.num_pairs).model_copy(update={"queries": 1})

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        pairs = self.num_pairs
        keys = permutations(bits[:, : self.num_keys])[:, :pairs]
        rest = bits[:, self.num_keys :]
        values = self.num_keys + below(rest[:, :pairs], self.num_values)
        which = below(rest[:, pairs : pairs + self.asked], pairs)
        both = np.stack([keys, values], axis=2)
        again = np.take_along_axis(both, which[:, :, None], axis=1)
        return np.concatenate([both, again], axis=1).reshape(len(bits), -1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Looks the last key up."""
        *pairs, asked = np.asarray(prompt).tolist()
        table = dict(zip(pairs[0::2], pairs[1::2], strict=True))
        return _looked_up(table, asked, "key", self.symbols)


class InductionConfig(SyntheticTask):
    """The induction head's task (Mamba, arXiv 2312.00752, sec. 4.1.2).

    `a3 a0 ! a5 a1 ... !`: one symbol stands once in random text; what followed it is asked at the
    end. A fixed-size memory suffices at any length.

    Attributes:
        length: the level, symbols of text, the marked one and the one after it included.
        alphabet: different symbols.
    """

    level_field: ClassVar[str] = "length"
    name: Literal["induction"] = "induction"
    length: int = Field(default=64, ge=2)
    alphabet: int = Field(default=16, ge=2)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The alphabet and the mark."""
        return (*numbered("a", self.alphabet), "!")

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The alphabet."""
        return tuple(range(self.alphabet))

    @property
    def prompt_length(self) -> int:
        """The text and the mark again."""
        return self.length + 1

    @property
    def answer_length(self) -> int:
        """One symbol."""
        return 1

    @property
    def draws(self) -> int:
        """The text and the mark's place."""
        return self.length + 1

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        rows, every = np.empty((len(bits), self.length + 2), np.int64), np.arange(len(bits))
        place = below(bits[:, 0], self.length - 1)
        rows[:, : self.length] = below(bits[:, 1:], self.alphabet)
        rows[every, place] = rows[:, self.length] = self.alphabet
        rows[:, self.length + 1] = rows[every, place + 1]
        return rows

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Finds the mark's first place."""
        text = np.asarray(prompt).tolist()
        place = text.index(text[-1])
        if place + 1 >= len(text):
            raise ValueError("the mark at the end has not been seen before")
        return np.array([text[place + 1]], np.int32)


class NeedleConfig(SyntheticTask):
    """Needles in a haystack (RULER's multi-key variant, arXiv 2404.06654).

    `f3 f1 k2 v5 f0 ... k7 v1 f3 ... k2`: keys and their values somewhere in filler; one key is
    asked at the end.

    Attributes:
        length: the level, symbols of filler.
        num_needles: keys with values; all but one are there to distract.
        num_keys: keys to choose from.
        num_values: values to choose from.
        num_fillers: different filler symbols.
        depth: where the asked key stands, from 0 (the start) to 1 (the end); null for anywhere.
    """

    level_field: ClassVar[str] = "length"
    name: Literal["needle"] = "needle"
    length: int = Field(default=96, ge=1)
    num_needles: int = Field(default=4, ge=1)
    num_keys: int = Field(default=16, ge=1)
    num_values: int = Field(default=16, ge=2)
    num_fillers: int = Field(default=16, ge=1)
    depth: float | None = Field(default=None, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _keys_suffice(self) -> Self:
        if self.num_needles > self.num_keys:
            raise ValueError(
                f"num_needles={self.num_needles} needs as many different keys, num_keys is "
                f"{self.num_keys}"
            )
        return self

    @property
    def symbols(self) -> tuple[str, ...]:
        """Keys, values, filler."""
        keys, values = numbered("k", self.num_keys), numbered("v", self.num_values)
        return keys + values + numbered("f", self.num_fillers)

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The values."""
        return tuple(range(self.num_keys, self.num_keys + self.num_values))

    @property
    def prompt_length(self) -> int:
        """Filler, needles and the question."""
        return self.length + 2 * self.num_needles + 1

    @property
    def answer_length(self) -> int:
        """One value."""
        return 1

    @property
    def shortcut(self) -> Shortcut:
        """Any value of the prompt."""
        return Shortcut("any value", _one_of_the_values(self.num_needles, self.num_values))

    @property
    def draws(self) -> int:
        """Filler, keys, values and places."""
        return self.length + self.num_keys + 2 * self.num_needles

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        rows, needles = len(bits), self.num_needles
        cuts = np.cumsum([self.length, self.num_keys, needles])
        filler, keys, values, places = np.split(bits, cuts, axis=1)
        filler = self.num_keys + self.num_values + below(filler, self.num_fillers)
        keys = permutations(keys)[:, :needles]
        values = self.num_keys + below(values, self.num_values)
        before = below(places, self.length + 1)  # filler symbols that stand before each needle
        if self.depth is not None:
            before[:, 0] = round(self.depth * self.length)
        # Sorting by place: filler i at i + 1/2; needles before the same filler in their own order.
        order = before + np.arange(needles) / (4.0 * needles)
        at_filler = np.broadcast_to(np.arange(self.length) + 0.5, (rows, self.length))
        at = np.concatenate([at_filler, order, order + 0.125 / needles], axis=1)
        symbols = np.concatenate([filler, keys, values], axis=1)
        text = np.take_along_axis(symbols, np.argsort(at, axis=1, kind="stable"), axis=1)
        return np.concatenate([text, keys[:, :1], values[:, :1]], axis=1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Reads all keys with the symbols after them."""
        *text, asked = np.asarray(prompt).tolist()
        table = {a: b for a, b in itertools.pairwise(text) if a < self.num_keys}
        return _looked_up(table, asked, "key", self.symbols)
