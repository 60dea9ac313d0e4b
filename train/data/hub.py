"""Documents of a dataset on the Hugging Face Hub, kept in our cache once they were read.

`datasets` (the extra `genlab[hub]`) streams the rows; after that the copy is all that is needed,
and neither the package nor a network is asked for any more.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import zstandard
from pydantic import Field

from ...errors import DataError, GenlabError, suggest
from .readers import read_texts
from .splits import Document, SplitConfig

FORMAT = "genlab-hub-1"
CONTENT_FILE, META_FILE, FIELD = "documents.jsonl.zst", "meta.json", "text"
INSTALL = "pip install 'genlab[hub]'"
# What is read; the rest of the config divides it.
READ = ("dataset", "config", "split", "text_column", "revision", "max_documents")


class HubConfig(SplitConfig):
    """A dataset on the Hugging Face Hub, by its id; a row is a document.

    Attributes:
        dataset: its id, such as `roneneldan/TinyStories`.
        config: which of its configurations, if it has several.
        split: which of its splits; ours are drawn from it.
        text_column: the column that holds the text.
        revision: a commit. A branch or tag is read once, and later commits on it are not seen.
        max_documents: only so many rows from its beginning; null for all.
    """

    name: Literal["hub"] = "hub"
    dataset: str = Field(min_length=1)
    config: str | None = None
    split: str = Field(default="train", min_length=1)
    text_column: str = Field(default="text", min_length=1)
    revision: str = Field(min_length=1)
    max_documents: int | None = Field(default=None, ge=1)

    def build(self) -> "HubSource":
        """Returns the source; rows are read when they are asked for."""
        return HubSource(self)


class HubSource:
    """The rows of one split of a dataset."""

    def __init__(self, config: HubConfig) -> None:
        """Reads nothing yet."""
        self.config = config

    @functools.cached_property
    def folder(self) -> Path:
        """The copy of the rows, made on first use.

        Raises:
            DataError: `datasets` is missing, the Hub is out of reach, there is no such dataset or
                column, or the disk is full.
        """
        # Not at the top: the cache knows sources.
        from .cache import default_cache_dir, ensure_folder, hash_key

        key = hash_key(format=FORMAT, **{name: str(getattr(self.config, name)) for name in READ})
        folder = default_cache_dir() / "hub" / key
        ensure_folder(folder, self._fetch)
        return folder

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the texts and the config, the revision included.

        Raises:
            DataError: the copy cannot be made, or was damaged since.
        """
        path = self.folder / META_FILE
        try:
            meta = json.loads(path.read_bytes())
            texts, wanted = str(meta["texts_sha256"]), meta["file_sha256"]
            with (self.folder / CONTENT_FILE).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(f"{path} cannot be read; delete {self.folder}") from None
        if found != wanted:
            raise DataError(f"{self.folder / CONTENT_FILE} is corrupt; delete {self.folder}")
        return hashlib.sha256(f"{self.config.canonical_json}{texts}".encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the rows that have text.

        Raises:
            DataError: see `folder`, or no row has any text.
        """
        name, empty = self.config.dataset, True
        texts = read_texts(self.folder / CONTENT_FILE, field=FIELD, documents="file")
        for number, text in enumerate(texts):
            if text:
                empty = False
                yield Document(f"{name}/{number}", name, text)
        if empty:
            raise DataError(f"source.dataset: no text in {name}, split {self.config.split!r}")

    def _fetch(self, folder: Path) -> None:
        """Streams the rows into a folder."""
        texts, count = hashlib.sha256(), 0
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        with (folder / CONTENT_FILE).open("wb") as file, compressor.stream_writer(file) as packed:
            for text in self._rows():
                data = text.encode("utf-8", "surrogatepass")
                texts.update(len(data).to_bytes(8, "little") + data)
                packed.write(json.dumps({FIELD: text}).encode() + b"\n")
                count += 1
        with (folder / CONTENT_FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        meta = {
            "format": FORMAT,
            "source": {name: getattr(self.config, name) for name in READ},
            "documents": count,
            "texts_sha256": texts.hexdigest(),
            "file_sha256": digest,
        }
        (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")

    def _rows(self) -> Iterator[str]:
        config, count = self.config, 0
        where = f"source.dataset {config.dataset!r}"
        try:
            rows = datasets_module().load_dataset(
                config.dataset,
                name=config.config,
                split=config.split,
                revision=config.revision,
                streaming=True,
            )
            for row in rows:
                yield self._text(row, f"{where}, row {count}")
                count += 1
                if count == config.max_documents:
                    return
        except GenlabError:
            raise
        except Exception as error:  # a network's errors are of many unrelated classes
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{where}: cannot be read after {count} rows: {said}") from None

    def _text(self, row: dict[str, Any], where: str) -> str:
        column = self.config.text_column
        if column not in row:
            raise DataError(f"{where}: source.text_column: no column {column!r}"
                            f"{suggest(column, row)}")  # fmt: skip
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise DataError(f"{where}: column {column!r} must hold strings, got {kind}")
        return row[column]


def datasets_module() -> Any:
    """Returns the package.

    Raises:
        DataError: it is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(f"source 'hub': package datasets is missing: {INSTALL}") from None
    return datasets
