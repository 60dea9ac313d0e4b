"""Divides documents into train, validation and test. A document never straddles them."""

import fnmatch
import hashlib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ...errors import DataError, suggest
from ...paradigms.config import Config
from .tokenizer import utf8

SPLITS = ("train", "validation", "test")


class Document(NamedTuple):
    """The unit of splitting, packing and shuffling.

    Attributes:
        id: unique within its source, such as `emma/007`.
        group: what it is part of: a novel or a file. `holdout` patterns match either.
        text: never empty.
    """

    id: str
    group: str
    text: str


class SplitConfig(Config):
    """How a source's documents are divided; part of every source's config.

    `test` is what results are reported on, `validation` what models are selected by; training sees
    neither. Shares are counted in documents and drawn by a hash of the text, so that equal texts
    land in the same split wherever the file lies.

    Attributes:
        holdout: patterns (`*` as in file names) of the groups or documents that make up `test`.
        holdout_fraction: instead, the share of documents that makes up `test`.
        validation_fraction: the share of the remaining documents that makes up `validation`.
        split_seed: another seed draws other documents.
    """

    holdout: tuple[str, ...] = ()
    holdout_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    validation_fraction: float = Field(default=0.02, ge=0.0, lt=1.0)
    split_seed: int = Field(default=0, ge=0, lt=1 << 32)

    @model_validator(mode="after")
    def _one_holdout(self) -> "SplitConfig":
        if self.holdout and self.holdout_fraction:
            raise ValueError("give either holdout or holdout_fraction, not both")
        return self


def _matches(pattern: str, document_id: str, group: str) -> bool:
    name = PurePosixPath(group)
    candidates = (document_id, group, name.name, name.name.split(".")[0])
    return any(fnmatch.fnmatchcase(c, pattern) for c in candidates)


def _lowest(hashes: NDArray[np.uint64], of: NDArray[np.bool_], fraction: float) -> NDArray:
    """Marks the given share of the marked documents, at least one: those of the lowest hashes.

    Equal hashes (equal texts) are taken together.
    """
    count = max(1, round(fraction * int(of.sum())))
    border = np.sort(hashes[of])[count - 1]
    return of & (hashes <= border)


def assign_splits(documents: Iterable[Document], config: SplitConfig) -> NDArray[np.uint8]:
    """Returns for each document the index of its split in `SPLITS`.

    Raises:
        DataError: no document; a holdout pattern that matches nothing; a split that was asked for
            or the training split comes out empty.
    """
    hashes, held = [], []
    hits = dict.fromkeys(config.holdout, 0)
    groups: set[str] = set()
    for document in documents:
        salted = config.split_seed.to_bytes(4, "little") + utf8(document.text)
        hashes.append(int.from_bytes(hashlib.sha256(salted).digest()[:8], "little"))
        matching = [p for p in config.holdout if _matches(p, document.id, document.group)]
        for pattern in matching:
            hits[pattern] += 1
        held.append(bool(matching))
        groups.add(document.group)
    for pattern, count in hits.items():
        if not count:
            hint = suggest(pattern, groups)
            if len(groups) > 20 and "did you mean" not in hint:
                hint = f"; there are {len(groups)} groups, such as {min(groups)!r}"
            raise DataError(f"holdout {pattern!r} matches no document{hint}")
    if not hashes:
        raise DataError("the source has no documents: it is empty")
    hash_array = np.array(hashes, np.uint64)
    test = np.array(held, bool)
    everything = np.ones_like(test)
    if config.holdout_fraction:
        test = _lowest(hash_array, everything, config.holdout_fraction)
    rest = everything & ~test
    validation = np.zeros_like(test)
    if config.validation_fraction and rest.any():
        validation = _lowest(hash_array, rest, config.validation_fraction)
    if not (rest & ~validation).any():
        raise DataError(
            f"of {len(hashes)} documents {int(test.sum())} are held out for test and "
            f"{int(validation.sum())} for validation: none is left to train on; lower "
            "holdout_fraction or validation_fraction (0 for none), or cut the source into more "
            "documents (`documents: paragraph`)"
        )
    return (validation * SPLITS.index("validation") + test * SPLITS.index("test")).astype(np.uint8)
