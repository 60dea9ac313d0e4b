"""What every synthetic task has: levels, splits that never share an example, a solver, a law."""

import abc
import functools
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from ....errors import ConfigError, DataError
from ....paradigms.config import Config
from ..splits import SPLITS
from .draws import Bits, below, mix, random_bits

FORMAT = "genlab-task-1"
# Of 16 equal shares of all examples, by a hash of their content.
SHARES = {"train": 14, "validation": 1, "test": 1}
MAX_ATTEMPTS = 1000  # a held-out split takes about 16: after these it has no example to give
_WEIGHTS_KEY = 0x5EED


class Shortcut(NamedTuple):
    """What a strategy that does not solve the task reaches.

    Attributes:
        name: the strategy, in plain words.
        exact: the share of examples that it gets right.
    """

    name: str
    exact: float


class TaskRows(NamedTuple):
    """Rows of symbols, numbered as in `SyntheticTask.symbols`, without special ids.

    Attributes:
        symbols: int32 [n R], -1 behind a row's end.
        scored: bool [n R], what training is scored on.
        levels: int64 [n].
    """

    symbols: NDArray[np.int32]
    scored: NDArray[np.bool_]
    levels: NDArray[np.int64]


class Examples(NamedTuple):
    """Questions of one level and their answers.

    Attributes:
        prompts: int32 [n P], symbols.
        answers: int32 [n A], symbols that continue the prompts.
    """

    prompts: NDArray[np.int32]
    answers: NDArray[np.int32]


class SyntheticTask(Config, abc.ABC):
    """A task whose rows are BOS, a prompt, and what is to be answered, last.

    A row is drawn at one level (a number of pairs, a depth, a length): the field that `level_field`
    names. Symbols do not depend on the level, so a model may be scored at others than it trained
    on. Which split an example belongs to is a hash of its content: training, validation and test
    never share one, whatever the seeds.

    Attributes:
        name: the registered name.
        min_level: training and validation rows have levels drawn uniformly from this up to the
            task's own; null for always its own.
    """

    level_field: ClassVar[str]
    name: str
    min_level: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _levels_in_order(self) -> Self:
        if self.min_level is not None and self.min_level > self.level:
            raise ValueError(
                f"min_level={self.min_level} is more than {self.level_field}={self.level}"
            )
        return self

    @property
    @abc.abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """The words of the task; a symbol's number is its place here."""

    @property
    @abc.abstractmethod
    def answer_symbols(self) -> tuple[int, ...]:
        """What an answer is made of; `chance` is that of drawing from these."""

    @property
    @abc.abstractmethod
    def prompt_length(self) -> int:
        """P, symbols of a prompt at this level."""

    @property
    @abc.abstractmethod
    def answer_length(self) -> int:
        """A, symbols of an answer at this level."""

    @property
    @abc.abstractmethod
    def draws(self) -> int:
        """Random numbers that one row takes."""

    @abc.abstractmethod
    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """Turns uint64 [n draws] into rows of symbols [n row_length], all at this level."""

    @abc.abstractmethod
    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Returns the answer [A] to a prompt [P], read off the prompt alone.

        Raises:
            ValueError: the prompt is none of this task.
        """

    @property
    def level(self) -> int:
        """The value of the field that `level_field` names."""
        return getattr(self, self.level_field)

    @property
    def row_length(self) -> int:
        """R, symbols of a training row at this level."""
        return self.prompt_length + self.answer_length

    @property
    def context_length(self) -> int:
        """T, tokens of the longest row, BOS included."""
        return 1 + self.row_length

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Which symbols of a training row are scored, bool [row_length]."""
        return np.arange(self.row_length) >= self.prompt_length

    @property
    def identity(self) -> slice:
        """The symbols of a row that make it the example it is."""
        return slice(0, self.prompt_length)

    @property
    def graded(self) -> int:
        """How many symbols at the answer's end must be right."""
        return self.answer_length

    @property
    def chance(self) -> float:
        """Share of examples that answers drawn from `answer_symbols` at random get right."""
        return float(len(self.answer_symbols)) ** -self.graded

    @property
    def shortcut(self) -> Shortcut | None:
        """The best known strategy that does not solve the task, or None."""
        return None

    def at_level(self, level: int) -> Self:
        """The same task at one other level.

        Raises:
            ConfigError: the task has no such level.
        """
        return _at_level(self, level)

    def as_examples(self) -> Self:
        """The task whose rows are one prompt and its answer, with nothing else to be scored."""
        return self.at_level(self.level)

    def rows(self, *, split: str, indices: NDArray[np.integer], seed: int) -> TaskRows:
        """Draws rows; a pure function of task, split, index and seed.

        Args:
            split: `train`, `validation` or `test`.
            indices: integers [n], at least 0.
            seed: from 0 to 2^63 - 1.

        Raises:
            DataError: no such split, or so few examples exist that none falls in it.
        """
        if split not in SPLITS:
            raise DataError(f"no split {split!r}; wanted one of {', '.join(SPLITS)}")
        indices = np.asarray(indices, np.int64)
        symbols = np.full((len(indices), self.row_length), -1, np.int32)
        scored = np.zeros(symbols.shape, bool)
        levels = np.zeros(len(indices), np.int64)
        pending = np.arange(len(indices))
        for attempt in range(MAX_ATTEMPTS):
            drawn, drawn_levels = self._attempt(seed, split, indices[pending], attempt)
            left = np.ones(len(pending), bool)
            for level in np.unique(drawn_levels):
                task = self.at_level(int(level))
                mine = np.flatnonzero(drawn_levels == level)
                rows = task.draw(drawn[mine, : task.draws])
                taken = _split_of(rows[:, task.identity]) == SPLITS.index(split)
                into, length = pending[mine[taken]], task.row_length
                symbols[into, :length] = rows[taken]
                scored[into, :length] = task.scored
                levels[into] = level
                left[mine[taken]] = False
            pending = pending[left]
            if not pending.size:
                return TaskRows(symbols, scored, levels)
        raise DataError(
            f"task {self.name} with {self.level_field}={self.level} has too few different "
            f"examples: none of {MAX_ATTEMPTS} falls in the {split} split"
        )

    def _attempt(
        self, seed: int, split: str, indices: NDArray[np.int64], attempt: int
    ) -> tuple[Bits, NDArray[np.int64]]:
        bits = random_bits(seed, SPLITS.index(split), indices, attempt, 1 + self.draws)
        if self.min_level is None:
            return bits[:, 1:], np.full(len(indices), self.level)
        span = self.level - self.min_level + 1
        return bits[:, 1:], self.min_level + below(bits[:, 0], span)

    def examples(self, *, split: str, indices: NDArray[np.integer], seed: int) -> Examples:
        """Draws prompts and answers of this task's own level; see `rows`."""
        task = self.as_examples()
        symbols = task.rows(split=split, indices=indices, seed=seed).symbols
        return Examples(symbols[:, : task.prompt_length], symbols[:, task.prompt_length :])


@functools.lru_cache(maxsize=4096)
def _at_level(task: SyntheticTask, level: int) -> SyntheticTask:
    values = {**task.model_dump(), task.level_field: level, "min_level": None}
    try:
        return type(task).model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{task.name} with {task.level_field}={level}: {first}"
        ) from None


def _split_of(content: NDArray[np.int64]) -> NDArray[np.int64]:
    """The split of each row, as an index into `SPLITS`."""
    weights = np.random.Philox(key=_WEIGHTS_KEY).random_raw(content.shape[1]) | np.uint64(1)
    sums = ((content.astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1, dtype=np.uint64)
    share = (mix(sums) >> np.uint64(60)).astype(np.int64)
    bounds = np.cumsum([SHARES[split] for split in SPLITS])
    return np.searchsorted(bounds, share, side="right")


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """`prefix0`, `prefix1` and so on."""
    return tuple(f"{prefix}{i}" for i in range(count))
