"""Serves batches of numbered rows: prefetched, endless, and resumable at any step in O(1)."""

import sys
from collections.abc import Callable, Iterator

import grain
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...paradigms.interface import Batch

PREFETCH_BATCHES = 8
PREFETCH_THREADS = 2
RowsOf = Callable[[NDArray[np.int64]], Batch]


class _StepBatches:
    """The random-access source that Grain reads: element s is this process's part of step s."""

    def __init__(self, rows: RowsOf, batch_size: int, index: int, count: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._mine = np.arange(batch_size)[index * batch_size // count :][: batch_size // count]

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size  # endless, with row numbers in 64 bits

    def __getitem__(self, step: int) -> tuple[int, Batch]:
        return step, self._rows(step * self._batch_size + self._mine)


def serve_batches(
    rows: RowsOf,
    *,
    batch_size: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[tuple[int, Batch]]:
    """Yields (step, batch) without end, prefetched by threads.

    The global batch of a step is rows `step * batch_size` onwards. Process p of n gets its p-th
    n-th, so resuming, with any number of processes, goes on with the same global batches. The
    whole state is the step number.

    Args:
        rows: gives the rows of these numbers, a pure function.
        batch_size: B over all processes.
        start_step: the first step to yield; reached in O(1).
        process_index: this process, from 0.
        process_count: processes; must divide B.

    Raises:
        ConfigError: `process_count` does not divide `batch_size`, or a number is out of range.
    """
    if batch_size < 1 or start_step < 0:
        raise ConfigError(f"batch_size {batch_size} must be >= 1, start_step {start_step} >= 0")
    if not 0 <= process_index < process_count or batch_size % process_count:
        raise ConfigError(
            f"batch_size {batch_size} cannot be divided over {process_count} processes "
            f"(this is process {process_index})"
        )
    dataset = grain.MapDataset.source(
        _StepBatches(rows, batch_size, process_index, process_count)
    ).slice(slice(start_step, None))
    options = grain.ReadOptions(num_threads=PREFETCH_THREADS, prefetch_buffer_size=PREFETCH_BATCHES)
    return iter(dataset.to_iter_dataset(options))
