"""Where rows come from: texts that ship with the package, files, the Hub, or a synthetic task."""

import functools
import glob
import hashlib
import importlib.resources
import itertools
import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from ...errors import DataError
from ...paradigms.config import choice_of
from .hub import HubConfig
from .readers import CHUNK_BYTES, decode_utf8, file_format, read_texts
from .splits import Document, SplitConfig
from .synthetic.registry import TASKS

# The order is the order of publication; it fixes document numbers.
CORPORA = {
    "austen": (
        "sense_and_sensibility",
        "pride_and_prejudice",
        "mansfield_park",
        "emma",
        "northanger_abbey",
        "persuasion",
    )
}
_CHAPTER = re.compile(
    r"(?:^VOLUME [IVXLC]+\s+)?^(?:CHAPTER|Chapter) (?:[IVXLC]+|[0-9]+)[ \t]*$", re.MULTILINE
)


class Source(Protocol):
    """Documents in a fixed order, read anew on each call of `documents`.

    Attributes:
        config: how the documents are divided.
        fingerprint: SHA-256 in hex of the contents and of every setting that changes documents.
    """

    config: SplitConfig

    @property
    def fingerprint(self) -> str:
        """Computed from the raw bytes, without parsing them."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yields all documents; empty texts are left out."""
        ...


def split_chapters(text: str) -> list[str]:
    """Cuts a novel before each chapter heading; the parts join to exactly the text.

    A title page belongs to the first chapter, a volume's heading to the chapter that follows it.
    """
    starts = [m.start() for m in _CHAPTER.finditer(text)]
    bounds = [0, *starts[1:], len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


class CorpusConfig(SplitConfig):
    """Texts that ship with the package, cut into chapters.

    Attributes:
        corpus: `austen`, Jane Austen's six novels (4.0 MB, public domain).
        holdout: as in `SplitConfig`; by default one whole novel.
    """

    name: Literal["corpus"] = "corpus"
    corpus: Literal["austen"] = "austen"
    holdout: tuple[str, ...] = ("persuasion",)

    def build(self) -> "CorpusSource":
        """Returns the source."""
        return CorpusSource(self)


class CorpusSource:
    """The embedded corpora."""

    def __init__(self, config: CorpusConfig) -> None:
        """Reads nothing yet."""
        self.config = config

    def _packed(self) -> Iterator[tuple[str, bytes]]:
        folder = importlib.resources.files(__package__).joinpath("corpora", self.config.corpus)
        for novel in CORPORA[self.config.corpus]:
            try:
                yield novel, folder.joinpath(f"{novel}.txt.xz").read_bytes()
            except OSError as error:
                raise DataError(f"embedded corpus file {novel}.txt.xz: {error.strerror}") from None

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the packed files and the config."""
        digest = hashlib.sha256(self.config.canonical_json.encode())
        for _, data in self._packed():
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the chapters of all novels."""
        for novel, data in self._packed():
            try:
                text = decode_utf8(lzma.decompress(data), novel)
            except lzma.LZMAError as error:
                raise DataError(
                    f"embedded corpus file {novel}.txt.xz is corrupt: {error}"
                ) from None
            for number, chapter in enumerate(split_chapters(text), start=1):
                yield Document(f"{novel}/{number:03d}", novel, chapter)


class FilesConfig(SplitConfig):
    """Local files.

    Attributes:
        paths: files or globs (`**` for any folders): .txt or .jsonl, plain or .gz, .xz or .zst, and
            .parquet. Relative ones start at the working directory.
        field: the key (.jsonl) or column (.parquet) that holds the text.
        documents: for .txt, what a document is: the `file`, or a `paragraph` (up to a blank line).
    """

    name: Literal["files"] = "files"
    paths: tuple[str, ...] = Field(min_length=1)
    field: str | None = None
    documents: Literal["file", "paragraph"] = "file"

    def build(self) -> "FilesSource":
        """Finds the files.

        Raises:
            DataError: a path or glob matches no file, or one of an unknown kind.
        """
        return FilesSource(self)


class FilesSource:
    """Documents of local files, files in order of their paths."""

    def __init__(self, config: FilesConfig) -> None:
        """Finds the files; reads nothing yet."""
        self.config = config
        found: set[Path] = set()
        for pattern in config.paths:
            expanded = os.path.expanduser(pattern)
            matches = [Path(p) for p in glob.glob(expanded, recursive=True)]
            files = {p.absolute() for p in matches if p.is_file()}
            if Path(expanded).is_file():  # a name that merely looks like a glob
                files.add(Path(expanded).absolute())
            if not files:
                if matches:
                    hint = f"; it is a folder: give a glob such as {pattern.rstrip('/')}/*.txt"
                else:
                    hint = "" if Path(expanded).is_absolute() else f" (from {os.getcwd()})"
                raise DataError(f"source.paths: {pattern!r} matches no file{hint}")
            found |= files
        self.files = sorted(found, key=lambda p: p.as_posix())
        for path in self.files:
            file_format(path)
        # Names are relative to the folder that all files share: moving the corpus changes nothing.
        common = os.path.commonpath([p.parent for p in self.files])
        self.names = [p.relative_to(common).as_posix() for p in self.files]

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the files' names and bytes and of the config without its paths."""
        settings = self.config.model_dump_json(exclude={"paths"})
        digest = hashlib.sha256(settings.encode())
        for path, name in zip(self.files, self.names, strict=True):
            content = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while data := file.read(CHUNK_BYTES):
                        content.update(data)
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from None
            digest.update(name.encode() + b"\0" + content.digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the documents of all files.

        Raises:
            DataError: a file cannot be read, or none has any text.
        """
        empty = True
        for path, name in zip(self.files, self.names, strict=True):
            texts = read_texts(path, field=self.config.field, documents=self.config.documents)
            for number, text in enumerate(texts):
                if text:
                    empty = False
                    yield Document(f"{name}/{number}", name, text)
        if empty:
            raise DataError(f"source.paths: no text in {', '.join(self.config.paths)}")


SOURCES = {"corpus": CorpusConfig, "files": FilesConfig, "hub": HubConfig}

SourceConfig = choice_of({**SOURCES, **TASKS})
