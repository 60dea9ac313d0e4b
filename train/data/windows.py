"""Evaluation windows: every token of a held-out text is scored exactly once.

Each document is cut into windows of T - 1 tokens, each behind a BOS of its own. Nothing is carried
from window to window, so every model family is asked the same question. EOS is not scored: the
bytes of the windows add up to exactly the bytes of the text.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import DataError
from ...paradigms.interface import Batch
from .store import TokenStore
from .tokenizer import Tokenizer


class EvaluationWindows:
    """The windows of a split, materialised batch by batch.

    Attributes:
        length: T.
        documents: int64 [windows], the document of each.
        starts: int64 [windows], its first token in the store.
        token_counts: int64 [windows], scored tokens.
        byte_counts: int64 [windows], the bytes of text that they stand for.
        total_windows: how many there are without the cap.
        complete: True when none was left out, so that `byte_counts` sums to the whole text.
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizer: Tokenizer,
        *,
        length: int,
        max_windows: int | None = None,
    ) -> None:
        """Cuts the split.

        Args:
            store: the held-out split.
            tokenizer: the one that made it.
            length: T, at least 2.
            max_windows: take only so many, evenly spaced over the split; None for all.

        Raises:
            DataError: the split is empty, or a limit is out of range.
        """
        if store.num_documents == 0:
            raise DataError(
                f"the {store.split} split is empty: set source.holdout, source.holdout_fraction or "
                "source.validation_fraction"
            )
        if length < 2:
            raise DataError(f"a window needs room for BOS and a token: length {length}")
        if max_windows is not None and max_windows < 1:
            raise DataError(f"max_windows must be at least 1, got {max_windows}")
        if store.specials != tokenizer.specials:
            raise DataError(f"the {store.split} split was made by another tokenizer")
        self.length = length
        self._store = store
        content = length - 1
        sizes = np.diff(store.offsets)
        # A document that encodes to nothing keeps one empty window, so that its bytes count.
        per_document = np.maximum(1, -(-sizes // content))
        self.documents = np.repeat(np.arange(store.num_documents), per_document)
        first_window = np.cumsum(per_document) - per_document
        number = np.arange(len(self.documents)) - first_window[self.documents]
        self.starts = store.offsets[self.documents] + number * content
        ends = np.minimum(self.starts + content, store.offsets[self.documents + 1])
        self.token_counts = ends - self.starts
        self.byte_counts = self._count_bytes(tokenizer, ends, number)
        self.total_windows = len(self.documents)
        if max_windows is not None and max_windows < self.total_windows:
            keep = (2 * np.arange(max_windows) + 1) * self.total_windows // (2 * max_windows)
            self.documents, self.starts = self.documents[keep], self.starts[keep]
            self.token_counts, self.byte_counts = self.token_counts[keep], self.byte_counts[keep]
        self.complete = len(self) == self.total_windows

    def _count_bytes(
        self, tokenizer: Tokenizer, ends: NDArray[np.int64], number: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Bytes up to each window's end, in differences; the last end of a document is its size.

        With a lossless tokenizer that is just the sum over tokens. A lossy one may stand for other
        bytes than the text has; clipping keeps each document's sum exact.
        """
        store = self._store
        cumulative = np.concatenate(
            [[0], np.cumsum(tokenizer.byte_lengths()[store.tokens], dtype=np.int64)]
        )
        sizes = store.byte_counts[self.documents]
        upto = cumulative[ends] - cumulative[store.offsets[self.documents]]
        last = np.append(np.diff(self.documents) != 0, True)
        upto = np.where(last, sizes, np.minimum(upto, sizes))
        before = np.where(number == 0, 0, np.roll(upto, 1))
        return upto - before

    def __len__(self) -> int:
        """Number of windows served."""
        return len(self.documents)

    @property
    def total_bytes(self) -> int:
        """Bytes of text in the windows served."""
        return int(self.byte_counts.sum())

    def rows(self, indices: ArrayLike) -> Batch:
        """Returns windows as NumPy arrays; index -1 gives a row of padding.

        Returns:
            tokens int32 [B T]; segment_ids int32 [B T], 0 or -1 for padding; loss_mask bool [B T],
            True on the text.
        """
        chosen = np.asarray(indices, np.int64)
        real = chosen >= 0
        counts = np.where(real, self.token_counts[chosen], -1)
        column = np.arange(self.length)
        valid = column <= counts[:, None]
        loss_mask = valid & (column > 0)
        source = self.starts[chosen][:, None] + column - 1
        tokens = np.full(valid.shape, self._store.specials.pad, np.int32)
        tokens[loss_mask] = self._store.tokens[source[loss_mask]]
        tokens[real, 0] = self._store.specials.bos
        return Batch(tokens, np.where(valid, 0, -1).astype(np.int32), loss_mask)

    def batches(self, batch_size: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yields (window indices [B], batch) over all windows, all of one shape.

        The last batch is filled up with rows of padding, whose index is -1.
        """
        for start in range(0, len(self), batch_size):
            indices = np.full(batch_size, -1, np.int64)
            count = min(batch_size, len(self) - start)
            indices[:count] = np.arange(start, start + count)
            yield indices, self.rows(indices)
