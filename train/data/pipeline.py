"""From a config to batches: the entry to the data layer."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from ...errors import ConfigError, DataError
from ...paradigms.config import Config
from ...paradigms.interface import Batch
from .batches import serve_batches
from .cache import (
    Progress,
    default_cache_dir,
    ensure_folder,
    hash_key,
    open_token_cache,
    token_cache_folder,
    write_token_cache,
)
from .packing import PackedRows
from .sources import CorpusConfig, Source, SourceConfig
from .splits import SPLITS, Document, assign_splits
from .store import TokenStore
from .symbols_tokenizer import SymbolsTokenizer
from .synthetic.data import TaskData, too_long
from .synthetic.task import SyntheticTask
from .tokenizer import FORMAT as TOKENIZER_FORMAT
from .tokenizer import Tokenizer
from .tokenizer_config import (
    BPETokenizerConfig,
    SymbolsTokenizerConfig,
    TokenizerConfig,
    load_tokenizer,
    save_tokenizer,
)
from .windows import EvaluationWindows


class DataConfig(Config):
    """What is trained on, and in which batches.

    Attributes:
        source: where documents come from and how they are split, or a synthetic task.
        tokenizer: how text becomes ids; `symbols` for a task.
        context_length: T, tokens per row.
        batch_size: B, rows per optimizer update over all processes.
        seed: orders documents and rows.
    """

    source: SourceConfig = CorpusConfig()
    tokenizer: TokenizerConfig = BPETokenizerConfig()
    context_length: int = Field(default=256, ge=2)
    batch_size: int = Field(default=4, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _parts_fit(self) -> "DataConfig":
        fault = self.fault
        if fault is not None:
            raise ValueError(fault)
        return self

    @property
    def fault(self) -> str | None:
        """What does not fit together, or None."""
        symbols = isinstance(self.tokenizer, SymbolsTokenizerConfig)
        if not isinstance(self.source, SyntheticTask):
            return "tokenizer 'symbols' needs a synthetic task as source" if symbols else None
        if not symbols:
            return (
                f"task {self.source.name!r} needs tokenizer: {{name: symbols}}, got "
                f"{self.tokenizer.name!r}"
            )
        fits = self.source.context_length <= self.context_length
        return None if fits else too_long(self.source, self.context_length)


def train_batches(
    store: TokenStore,
    *,
    batch_size: int,
    length: int,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[tuple[int, Batch]]:
    """Yields (step, batch) without end, prefetched by threads.

    The global batch of a step is rows `step * batch_size` onwards of `PackedRows`: a pure function
    of store, seed and step. Process p of n gets its p-th n-th, so resuming, with any number of
    processes, goes on with the same global batches. The whole state is the step number.

    Args:
        store: the training split.
        batch_size: B over all processes.
        length: T.
        seed: orders documents and rows.
        start_step: the first step to yield; reached in O(1).
        process_index: this process, from 0.
        process_count: processes; must divide B.

    Returns:
        An iterator of steps and NumPy batches of shape [B / process_count, T].

    Raises:
        DataError: the split is shorter than a row.
        ConfigError: `process_count` does not divide `batch_size`.
    """
    return serve_batches(
        PackedRows(store, length=length, seed=seed),
        batch_size=batch_size,
        start_step=start_step,
        process_index=process_index,
        process_count=process_count,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """A source, tokenised and split.

    Attributes:
        config: what it was built from.
        source: the documents as text.
        tokenizer: what turned them into ids.
        train: what is trained on.
        validation: what models are selected by; may be empty.
        test: what results are reported on; may be empty.
    """

    config: DataConfig
    source: Source
    tokenizer: Tokenizer
    train: TokenStore
    validation: TokenStore
    test: TokenStore

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the source, its split and the tokenizer."""
        return hash_key(source=self.source.fingerprint, tokenizer=self.tokenizer.fingerprint)

    def store(self, split: str) -> TokenStore:
        """Returns `train`, `validation` or `test`.

        Raises:
            DataError: no such split.
        """
        if split not in SPLITS:
            raise DataError(f"no split {split!r}; wanted one of {', '.join(SPLITS)}")
        return getattr(self, split)

    def documents(self, split: str) -> Iterator[Document]:
        """Yields the documents of a split as text, in the order of its store."""
        names = iter(self.store(split).names)
        wanted = next(names, None)
        for document in self.source.documents():
            if document.id == wanted:
                yield document
                wanted = next(names, None)

    def train_batches(
        self, *, start_step: int = 0, process_index: int = 0, process_count: int = 1
    ) -> Iterator[tuple[int, Batch]]:
        """`train_batches` of the training split with the config's sizes and seed."""
        return train_batches(
            self.train,
            batch_size=self.config.batch_size,
            length=self.config.context_length,
            seed=self.config.seed,
            start_step=start_step,
            process_index=process_index,
            process_count=process_count,
        )

    def evaluation_windows(
        self, split: str, *, length: int | None = None, max_windows: int | None = None
    ) -> EvaluationWindows:
        """The windows of a split; `length` defaults to the config's context length."""
        return EvaluationWindows(
            self.store(split),
            self.tokenizer,
            length=self.config.context_length if length is None else length,
            max_windows=max_windows,
        )


def _refuse_changed(source: Source) -> None:
    """Refuses files that were written to while a cache was made from them."""
    if source.config.build().fingerprint != source.fingerprint:
        raise DataError("the source's files changed while they were being read: run again")


def build_data(
    config: DataConfig, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Data | TaskData:
    """Reads, splits and tokenises a source, or opens what an earlier call left in the cache.

    A synthetic task needs no cache: its rows are drawn when they are asked for.

    Args:
        config: what to build.
        cache_dir: where caches live; None for `default_cache_dir()`.
        progress: called as progress(phase, documents done, documents in all).

    Raises:
        ConfigError: source, tokenizer and context length do not fit together.
        DataError: anything is wrong with the source, the tokenizer or the cache, or the training
            split is shorter than `context_length`.
    """
    if config.fault is not None:
        raise ConfigError(f"data: {config.fault}")
    if isinstance(config.source, SyntheticTask):
        return TaskData(config, config.source, SymbolsTokenizer(config.source.symbols))
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    source = config.source.build()

    @functools.cache
    def assignment() -> np.ndarray:
        return assign_splits(source.documents(), config.source)

    def train_texts() -> Iterator[str]:
        total = len(assignment())
        for done, (document, split) in enumerate(
            zip(source.documents(), assignment(), strict=False), start=1
        ):
            if SPLITS[split] == "train":
                yield document.text
            if progress:
                progress("train tokenizer", done, total)

    if config.tokenizer.trained:
        key = hash_key(
            format=TOKENIZER_FORMAT,
            source=source.fingerprint,
            config=config.tokenizer.canonical_json,
        )
        folder = cache / "tokenizers" / key

        def train_tokenizer(target: Path) -> None:
            save_tokenizer(config.tokenizer.build(train_texts()), target)
            _refuse_changed(source)

        ensure_folder(folder, train_tokenizer)
        try:
            tokenizer = load_tokenizer(folder)
        except DataError as error:
            raise DataError(f"{error}; delete {folder} to rebuild it") from None
    else:
        tokenizer = config.tokenizer.build()

    folder = token_cache_folder(cache, source, tokenizer)

    def tokenise(target: Path) -> None:
        write_token_cache(target, source, assignment(), tokenizer, progress)
        _refuse_changed(source)

    ensure_folder(folder, tokenise)
    train, validation, test = open_token_cache(folder, source, tokenizer)
    PackedRows(train, length=config.context_length, seed=config.seed)  # long enough?
    return Data(config, source, tokenizer, train, validation, test)
