"""A task in the place of a tokenised text: the same ways in as `Data` in `pipeline.py` has."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....errors import ConfigError, DataError
from ....paradigms.interface import Batch
from ..batches import serve_batches
from ..cache import hash_key
from ..splits import SPLITS
from ..symbols_tokenizer import SymbolsTokenizer
from ..tokenizer import SpecialIds
from .task import FORMAT, SyntheticTask

HELD_OUT_EXAMPLES = 512  # rows of a held-out split when no number is asked for
HELD_OUT_SEED = 0  # runs that differ in seeds are evaluated on the same rows


def task_batch(
    task: SyntheticTask,
    specials: SpecialIds,
    *,
    split: str,
    indices: NDArray[np.integer],
    seed: int,
    length: int,
) -> Batch:
    """Rows of a task as NumPy arrays: BOS, the symbols, padding.

    Returns:
        tokens int32 [B T]; segment_ids int32 [B T], 0 or -1 for padding; loss_mask bool [B T], True
        on what is to be answered.

    Raises:
        ConfigError: rows are longer than `length`.
    """
    if task.context_length > length:
        raise ConfigError(too_long(task, length))
    rows = task.rows(split=split, indices=indices, seed=seed)
    width = 1 + rows.symbols.shape[1]
    tokens = np.full((len(rows.symbols), length), specials.pad, np.int32)
    loss_mask = np.zeros(tokens.shape, bool)
    tokens[:, 1:width] = np.where(rows.symbols >= 0, rows.symbols, specials.pad)
    tokens[:, 0] = specials.bos
    loss_mask[:, 1:width] = rows.scored
    return Batch(tokens, np.where(tokens == specials.pad, -1, 0).astype(np.int32), loss_mask)


def too_long(task: SyntheticTask, length: int) -> str:
    """Says that a row does not fit."""
    return (
        f"context_length={length} is too short for task {task.name} with {task.level_field}="
        f"{task.level}, whose rows have {task.context_length} tokens, BOS included"
    )


class TaskWindows:
    """Held-out rows of a task, scored on their answers.

    Attributes:
        length: T.
        token_counts: int64 [windows], scored tokens.
        byte_counts: int64 [windows], bytes of the words that they stand for, a space each included.
        total_windows: as many as are served: rows are drawn, there is no last one.
        complete: True.
    """

    def __init__(
        self,
        task: SyntheticTask,
        tokenizer: SymbolsTokenizer,
        *,
        split: str,
        length: int,
        max_windows: int | None = None,
    ) -> None:
        """Draws them.

        Raises:
            ConfigError: rows are longer than `length`.
            DataError: `max_windows` is less than 1, or the task has too few examples.
        """
        if max_windows is not None and max_windows < 1:
            raise DataError(f"max_windows must be at least 1, got {max_windows}")
        count = HELD_OUT_EXAMPLES if max_windows is None else max_windows
        self.length = length
        self._pad = tokenizer.specials.pad
        self._batch = task_batch(
            task,
            tokenizer.specials,
            split=split,
            indices=np.arange(count),
            seed=HELD_OUT_SEED,
            length=length,
        )
        self.token_counts = self._batch.loss_mask.sum(axis=1)
        sizes = tokenizer.byte_lengths().astype(np.int64)[self._batch.tokens]
        self.byte_counts = np.where(self._batch.loss_mask, sizes, 0).sum(axis=1)
        self.total_windows = count
        self.complete = True

    def __len__(self) -> int:
        """Number of windows served."""
        return self.total_windows

    @property
    def total_bytes(self) -> int:
        """Bytes of all answers."""
        return int(self.byte_counts.sum())

    def rows(self, indices: ArrayLike) -> Batch:
        """Returns windows as NumPy arrays; index -1 gives a row of padding."""
        chosen = np.asarray(indices, np.int64)
        real = (chosen >= 0)[:, None]
        tokens, segments, loss_mask = (part[chosen] for part in self._batch)
        return Batch(
            np.where(real, tokens, self._pad), np.where(real, segments, -1), loss_mask & real
        )

    def batches(self, batch_size: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yields (window indices [B], batch); the last is filled up with rows of index -1."""
        for start in range(0, len(self), batch_size):
            indices = np.full(batch_size, -1, np.int64)
            count = min(batch_size, len(self) - start)
            indices[:count] = np.arange(start, start + count)
            yield indices, self.rows(indices)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskData:
    """A task, ready to train on.

    Attributes:
        config: what it was built from (`genlab.train.data.pipeline.DataConfig`).
        task: the config's source.
        tokenizer: its symbols.
    """

    config: Any
    task: SyntheticTask
    tokenizer: SymbolsTokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the task and its symbols."""
        return hash_key(
            format=FORMAT,
            source=self.task.canonical_json,
            tokenizer=self.tokenizer.fingerprint,
        )

    def train_batches(
        self, *, start_step: int = 0, process_index: int = 0, process_count: int = 1
    ) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) without end; see `genlab.train.data.batches.serve_batches`."""

        def rows(numbers: NDArray[np.int64]) -> Batch:
            return task_batch(
                self.task,
                self.tokenizer.specials,
                split="train",
                indices=numbers,
                seed=self.config.seed,
                length=self.config.context_length,
            )

        return serve_batches(
            rows,
            batch_size=self.config.batch_size,
            start_step=start_step,
            process_index=process_index,
            process_count=process_count,
        )

    def evaluation_windows(
        self, split: str, *, length: int | None = None, max_windows: int | None = None
    ) -> TaskWindows:
        """Held-out rows; `length` defaults to the config's context length.

        Raises:
            ConfigError: rows are longer than `length`.
            DataError: no such split, or too few examples exist.
        """
        return TaskWindows(
            self.task,
            self.tokenizer,
            split=split,
            length=self.config.context_length if length is None else length,
            max_windows=max_windows,
        )

    def store(self, split: str) -> NoReturn:
        """A task has no documents.

        Raises:
            ConfigError: always, if the split is one.
            DataError: no such split.
        """
        if split not in SPLITS:
            raise DataError(f"no split {split!r}; wanted one of {', '.join(SPLITS)}")
        raise ConfigError(
            f"data.source: task {self.task.name} has no documents; what reads text (judges, "
            "compression floors) needs a source of text"
        )

    @property
    def train(self) -> NoReturn:
        """A task has no documents: raises ConfigError."""
        self.store("train")

    @property
    def validation(self) -> NoReturn:
        """A task has no documents: raises ConfigError."""
        self.store("validation")

    @property
    def test(self) -> NoReturn:
        """A task has no documents: raises ConfigError."""
        self.store("test")

    def documents(self, split: str) -> NoReturn:
        """A task has no documents: raises ConfigError."""
        self.store(split)
