"""Packing as an index: which tokens make up row r is computed, never buffered.

The stream of an epoch is the concatenation, in an order drawn for the epoch, of

    [BOS, the document's tokens..., EOS]

closed to a ring and entered at a position drawn for the epoch. With L tokens on the ring and rows
of T tokens, the epoch has R = L // (T - 1) rows: row r is BOS followed by the T - 1 tokens from
`shift + r (T - 1)` on, and rows are served in a drawn order, so that one batch is not all of one
document. The L mod (T - 1) tokens that fill no row are left out of this epoch; which ones changes
with the shift. Rows never cross epochs, and every row is full.

Every row starts with BOS. Where the T - 1 tokens begin with a document's own BOS, it is not
doubled: the row is then the T tokens from there on, its last one being seen once more at the start
of the next row.

All is a pure function of (seed, epoch, row): the batch of step s needs no history, and resuming at
any step costs nothing. The draws come from raw Philox bits, whose values no NumPy release changes.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import DataError
from ...paradigms.interface import Batch
from .store import TokenStore
from .tokenizer import SpecialIds


class _Epoch(NamedTuple):
    """Attributes: documents in ring order, their starts on the ring (and L), entry, row order."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    shift: int
    rows: NDArray[np.int64]


class PackedRows:
    """Endless rows of packed documents, by number.

    Attributes:
        length: T, tokens per row.
        rows_per_epoch: R; row g belongs to epoch g // R.
        ring_length: L, all tokens of an epoch with BOS and EOS.
    """

    def __init__(self, store: TokenStore, *, length: int, seed: int) -> None:
        """Checks that the documents fill a row.

        Args:
            store: the documents.
            length: T, at least 2.
            seed: orders documents and rows; any integer from 0 to 2^63 - 1.

        Raises:
            DataError: fewer tokens than one row.
        """
        if length < 2:
            raise DataError(f"a row needs room for BOS and a token: length {length}, wanted >= 2")
        if not 0 <= seed < 1 << 63:
            raise DataError(f"seed must be from 0 to 2^63 - 1, got {seed}")
        self.length = length
        self.ring_length = store.num_tokens + 2 * store.num_documents
        if store.num_tokens == 0 or self.ring_length < length:
            raise DataError(
                f"the {store.split} split has {self.ring_length} tokens (BOS and EOS of "
                f"{store.num_documents} documents included), fewer than the context length of "
                f"{length}"
            )
        self.rows_per_epoch = self.ring_length // (length - 1)
        self._store = store
        self._seed = seed
        # A batch touches at most two epochs unless the corpus is tiny.
        self._epoch = functools.lru_cache(maxsize=3)(self._draw_epoch)

    def _draw_epoch(self, epoch: int) -> _Epoch:
        bits = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
        documents = np.argsort(bits.random_raw(self._store.num_documents), kind="stable")
        shift = int(bits.random_raw() % self.ring_length)
        rows = np.argsort(bits.random_raw(self.rows_per_epoch), kind="stable")
        lengths = np.diff(self._store.offsets)[documents] + 2
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return _Epoch(documents, starts, shift, rows)

    def __call__(self, rows: ArrayLike) -> Batch:
        """Returns the rows of these numbers as NumPy arrays.

        Args:
            rows: integers [B], at least 0.

        Returns:
            tokens int32 [B T]; segment_ids int32 [B T], the document within the row from 0 on;
            loss_mask bool [B T], True for everything but BOS.
        """
        numbers = np.asarray(rows, np.int64)
        epochs = numbers // self.rows_per_epoch
        batch = Batch(
            np.empty((len(numbers), self.length), np.int32),
            np.empty((len(numbers), self.length), np.int32),
            np.empty((len(numbers), self.length), bool),
        )
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            part = self._rows_of(self._epoch(int(epoch)), numbers[mine] % self.rows_per_epoch)
            for whole, piece in zip(batch, part, strict=True):
                whole[mine] = piece
        return batch

    def _rows_of(self, epoch: _Epoch, rows: NDArray[np.int64]) -> Batch:
        store, ring = self._store, self.ring_length
        first = (epoch.shift + epoch.rows[rows] * (self.length - 1)) % ring
        at_document = epoch.starts[np.searchsorted(epoch.starts, first)] == first
        # The row's own BOS takes the place before its tokens, or is the document's.
        begin = np.where(at_document, first, first - 1)
        position = (begin[:, None] + np.arange(self.length)) % ring
        index = np.searchsorted(epoch.starts, position, side="right") - 1
        within = position - epoch.starts[index]
        is_bos = within == 0
        is_eos = position == epoch.starts[index + 1] - 1
        source = store.offsets[epoch.documents[index]] + within - 1
        tokens = store.tokens[np.where(is_bos | is_eos, 0, source)].astype(np.int32)
        tokens[is_bos] = store.specials.bos
        tokens[is_eos] = store.specials.eos
        tokens[:, 0] = store.specials.bos
        is_bos[:, 0] = True
        segment_ids = np.cumsum(is_bos, axis=1, dtype=np.int32) - 1
        return Batch(tokens, segment_ids, ~is_bos)


def pack_documents(
    documents: Sequence[ArrayLike], *, length: int, specials: SpecialIds, rows: int | None = None
) -> Batch:
    """Packs whole documents into rows, first fit in order; none is cut.

    Args:
        documents: ids of each, without BOS and EOS, which are added.
        length: T.
        specials: the tokenizer's.
        rows: B, filled up with rows of padding; None for as many as are needed.

    Returns:
        NumPy arrays: tokens int32 [B T], segment_ids int32 [B T] (-1 for padding at the end),
        loss_mask bool [B T].

    Raises:
        DataError: a document is longer than a row, or there are too few rows.
    """
    contents: list[list[np.ndarray]] = []
    free: list[int] = []
    for number, ids in enumerate(documents):
        whole = np.concatenate([[specials.bos], np.asarray(ids, np.int32), [specials.eos]])
        if len(whole) > length:
            raise DataError(
                f"document {number} has {len(whole)} tokens with BOS and EOS, more than the row "
                f"length of {length}"
            )
        row = next((r for r, room in enumerate(free) if room >= len(whole)), len(free))
        if row == len(free):
            contents.append([])
            free.append(length)
        contents[row].append(whole)
        free[row] -= len(whole)
    count = len(free) if rows is None else rows
    if count < len(free):
        raise DataError(f"the documents need {len(free)} rows of {length}, got {rows}")
    tokens = np.full((count, length), specials.pad, np.int32)
    segment_ids = np.full((count, length), -1, np.int32)
    loss_mask = np.zeros((count, length), bool)
    for row, parts in enumerate(contents):
        start = 0
        for segment, part in enumerate(parts):
            end = start + len(part)
            tokens[row, start:end] = part
            segment_ids[row, start:end] = segment
            loss_mask[row, start + 1 : end] = True
            start = end
    return Batch(tokens, segment_ids, loss_mask)
