"""Choosing a tokenizer in YAML, and keeping one with a run."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ...errors import ConfigError, DataError
from ...paradigms.config import Config, choice_of
from .json_tokenizer import read_json_tokenizer, train_bpe
from .symbols_tokenizer import read_symbols
from .tokenizer import FORMAT, BytesTokenizer, Tokenizer

META_FILE = "tokenizer_meta.json"
CONTENT_FILE = "tokenizer.json"


class BytesTokenizerConfig(Config):
    """One id per byte; 260 ids with the special ones."""

    trained: ClassVar[bool] = False
    name: Literal["bytes"] = "bytes"

    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """Returns the tokenizer; needs no text."""
        return BytesTokenizer()


class BPETokenizerConfig(Config):
    """Byte-level BPE trained on the training split.

    Attributes:
        vocab_size: all ids, the 256 bytes and the 4 special ones included.
    """

    trained: ClassVar[bool] = True
    name: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=512, ge=260, le=1 << 20)

    def build(self, texts: Iterable[str]) -> Tokenizer:
        """Trains on the texts.

        Raises:
            DataError: too little text for `vocab_size` pieces.
        """
        return train_bpe(texts, self.vocab_size)


class FileTokenizerConfig(Config):
    """Any `tokenizer.json` from disk.

    Attributes:
        path: the file.
    """

    trained: ClassVar[bool] = False
    name: Literal["file"] = "file"
    path: str

    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """Loads the file; needs no text.

        Raises:
            DataError: missing or not a tokenizer.
        """
        return read_json_tokenizer(Path(self.path))


class SymbolsTokenizerConfig(Config):
    """One id per symbol of the synthetic task that the source is; for nothing else."""

    trained: ClassVar[bool] = False
    name: Literal["symbols"] = "symbols"

    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """There are no symbols without a task.

        Raises:
            ConfigError: always; `build_data` makes the tokenizer from the task.
        """
        raise ConfigError("tokenizer 'symbols' belongs to a synthetic task, not to text")


TokenizerConfig = choice_of(
    {
        "bytes": BytesTokenizerConfig,
        "bpe": BPETokenizerConfig,
        "file": FileTokenizerConfig,
        "symbols": SymbolsTokenizerConfig,
    }
)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer and its fingerprint into an existing folder; `load_tokenizer` reads it.

    Raises:
        DataError: the folder cannot be written.
    """
    meta = {
        "format": FORMAT,
        "kind": tokenizer.kind,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "specials": tokenizer.specials._asdict(),
    }
    files = {META_FILE: json.dumps(meta, indent=2) + "\n"}
    if tokenizer.kind != "bytes":
        files = {CONTENT_FILE: tokenizer.content, **files}
    for name, text in files.items():
        temporary = folder / f"{name}.{os.getpid()}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8", newline="")
            temporary.replace(folder / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(f"cannot write {folder / name}: {error.strerror}") from None


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads what `save_tokenizer` wrote.

    Raises:
        DataError: missing, unreadable, or not what was saved (by its fingerprint).
    """
    path = folder / META_FILE
    try:
        meta = json.loads(path.read_bytes())
        kind, fingerprint, form = meta["kind"], meta["fingerprint"], meta["format"]
    except OSError as error:
        raise DataError(f"no saved tokenizer: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is corrupt: not the description of a tokenizer") from None
    if form != FORMAT:
        raise DataError(f"{path} has the format {form!r}, this version reads {FORMAT!r}")
    if kind == "bytes":
        tokenizer: Tokenizer = BytesTokenizer()
    elif kind in ("bpe", "file"):
        tokenizer = read_json_tokenizer(folder / CONTENT_FILE, kind)
    elif kind == "symbols":
        tokenizer = _load_symbols(folder / CONTENT_FILE)
    else:
        raise DataError(f"{path} is corrupt: unknown tokenizer kind {kind!r}")
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"{folder / CONTENT_FILE} is corrupt or was replaced: fingerprint "
            f"{tokenizer.fingerprint[:12]}, recorded {str(fingerprint)[:12]}"
        )
    return tokenizer


def _load_symbols(path: Path) -> Tokenizer:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return read_symbols(content, str(path))
