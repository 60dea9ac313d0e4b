"""Reads documents from local files: .txt, .jsonl and .parquet, compressed or not."""

import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from ...errors import DataError, suggest

CHUNK_BYTES = 1 << 20
COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = (".txt", ".jsonl", ".parquet")


def file_format(path: Path) -> str:
    """Returns `.txt`, `.jsonl` or `.parquet`, seeing through a compression suffix.

    Raises:
        DataError: another kind of file.
    """
    suffixes = [s.lower() for s in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    kind = suffixes[-2] if compressed and len(suffixes) > 1 else (suffixes or [""])[-1]
    if kind not in FORMATS or (compressed and kind == ".parquet"):
        raise DataError(
            f"{path}: cannot read this kind of file; wanted .txt or .jsonl (also .gz, .xz, .zst), "
            "or .parquet"
        )
    return kind


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    # zstandard's own stream reader ends silently where a file was cut off; this tells.
    decoder = None
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            while data:
                decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
                yield decoder.decompress(data)
                data = b""
                if decoder.eof:
                    data, decoder = decoder.unused_data, None
    if decoder is not None:
        raise EOFError("compressed file ended early")


def _chunks(path: Path) -> Iterator[bytes]:
    """Yields the uncompressed bytes of a file.

    Raises:
        DataError: missing, unreadable or cut off.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".zst":
            yield from _zstd_chunks(path)
            return
        opener = {".gz": gzip.open, ".xz": lzma.open}.get(suffix, open)
        with opener(path, "rb") as file:
            while data := file.read(CHUNK_BYTES):
                yield data
    except (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: corrupt or truncated {suffix} file: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, split at line feeds alone, as JSON Lines has it."""
    rest = b""
    for chunk in _chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def decode_utf8(data: bytes, where: str) -> str:
    """Decodes strictly.

    Raises:
        DataError: the bytes are no UTF-8; names the place.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        ) from None


def split_paragraphs(text: str) -> list[str]:
    """Cuts a text behind its blank lines; the parts join to exactly the text."""
    cuts = [m.end() for m in re.finditer(r"\n(?:[ \t\r]*\n)+", text)]
    bounds = [0, *cuts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def read_texts(path: Path, *, field: str | None, documents: str) -> Iterator[str]:
    """Yields the documents' texts of one file in order.

    Args:
        path: the file; its suffix says what it is.
        field: the key (.jsonl) or column (.parquet) that holds the text.
        documents: for .txt, `file` or `paragraph`.

    Raises:
        DataError: the file cannot be read as what it claims to be, or `field` is missing in it.
    """
    kind = file_format(path)
    if kind == ".txt":
        if field is not None:
            raise DataError(f"{path}: a .txt file has no fields; leave out field {field!r}")
        text = decode_utf8(b"".join(_chunks(path)), str(path))
        yield from split_paragraphs(text) if documents == "paragraph" else [text]
        return
    if documents != "file":
        raise DataError(f"{path}: documents {documents!r} is for .txt; here a document is a row")
    if field is None:
        raise DataError(
            f"{path}: a {kind} source needs `field`, the name of its text column or key"
        )
    yield from _read_jsonl(path, field) if kind == ".jsonl" else _read_parquet(path, field)


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(decode_utf8(line, where))
        except ValueError as error:
            raise DataError(f"{where}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: wanted a JSON object, got {type(row).__name__}")
        if field not in row:
            raise DataError(f"{where}: no field {field!r}{suggest(field, row)}")
        if not isinstance(row[field], str):
            kind = type(row[field]).__name__
            raise DataError(f"{where}: field {field!r} must be a string, got {kind}")
        yield row[field]


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise DataError(f"{path}: no column {field!r}{suggest(field, schema.names)}")
            kind = schema.field(field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise DataError(f"{path}: column {field!r} must hold strings, got {kind}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise DataError(f"{path}, row {row}: column {field!r} is null")
                    yield text
                    row += 1
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: corrupt or no parquet file: {reason}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column {field!r} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
