"""Writing and reading of `results.json` and `results.csv`: whole and finite, or not at all."""

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import DataError, GenlabError
from .results import Results, Row


def _unwritable(value: Any, path: str) -> Iterator[str]:
    """Yields `path = value` for what JSON or UTF-8 cannot hold; list items go by their name."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path} = {value}"
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        yield f"{path} holds half of a surrogate pair"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unwritable(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            label = item.get("name", index) if isinstance(item, dict) else index
            yield from _unwritable(item, f"{path}[{label}]")


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes `path` whole or not at all: a reader never sees half a file.

    Raises:
        GenlabError: the folder cannot be written, or the disk is full; an older file stays.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise GenlabError(f"cannot write {path}: {error.strerror or error}") from error


_CSV_SKIP = {
    "likelihood", "latency", "curve", "training_curve", "resolved_config", "sampler", "phases_s",
    "reasons", "sample", "prompt", "bits_per_byte_ci95", "distinct_n", "recipe", "profile",
    "state_windows",
}  # fmt: skip


def csv_columns() -> list[str]:
    """Returns the columns of `results.csv`: the scalar fields of a row, in order."""
    columns: list[str] = []
    for field in Row.model_fields:
        if field == "bits_per_byte_ci95":
            columns += ["bits_per_byte_ci95_low", "bits_per_byte_ci95_high"]
        elif field == "likelihood":
            columns += ["likelihood_estimator", "likelihood_draws", "likelihood_nats",
                        "likelihood_tokens", "likelihood_bytes",
                        "likelihood_standard_error_bits_per_byte"]  # fmt: skip
        elif field == "distinct_n":
            columns += ["distinct_1", "distinct_2", "distinct_3"]
        elif field == "recipe":
            columns.append("recipe")
        elif field not in _CSV_SKIP:
            columns.append(field)
    return columns


def _csv_row(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {
        field: getattr(row, field) for field in Row.model_fields if field not in _CSV_SKIP
    }
    low, high = row.bits_per_byte_ci95 or (None, None)
    flat |= {"bits_per_byte_ci95_low": low, "bits_per_byte_ci95_high": high}
    for key in ("estimator", "draws", "nats", "tokens", "bytes", "standard_error_bits_per_byte"):
        flat[f"likelihood_{key}"] = row.likelihood and getattr(row.likelihood, key)
    for n in "123":
        flat[f"distinct_{n}"] = (row.distinct_n or {}).get(n)
    flat["recipe"] = " | ".join(row.recipe)
    return {key: "" if value is None else value for key, value in flat.items()}


def write_results(results: Results, out_dir: str | Path) -> tuple[Path, Path]:
    """Writes `results.json` and `results.csv` into `out_dir`, each atomically.

    Returns:
        the two paths.

    Raises:
        GenlabError: a value is NaN, infinite or no Unicode (named by row and key; nothing is
            written), or the folder cannot be written.
    """
    payload = results.model_dump(mode="python")
    bad = list(_unwritable(payload, ""))
    if bad:
        raise GenlabError(
            f"results hold {len(bad)} value(s) that cannot be written: {'; '.join(bad[:5])}; "
            "nothing was written (a figure that could not be measured is null with a reason)"
        )
    out_dir = Path(out_dir)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, fieldnames=csv_columns(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_row(row) for row in results.rows)
    json_path, csv_path = out_dir / "results.json", out_dir / "results.csv"
    text = json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=False)
    atomic_write(json_path, text + "\n")
    atomic_write(csv_path, table.getvalue())
    return json_path, csv_path


def load_results(path: str | Path) -> Results:
    """Reads and validates a `results.json` (or the folder that holds one).

    Raises:
        DataError: the file is missing, is not JSON, or does not fit the schema; the first faulty
            key is named.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"

    def refuse(constant: str) -> None:
        raise DataError(f"{path}: holds {constant}, which is not a figure")

    try:
        raw = path.read_text(encoding="utf-8")
        json.loads(raw, parse_constant=refuse)
        return Results.model_validate_json(raw)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: {where or 'top level'}: {first['msg']}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(f"{path}: not valid JSON: {error}") from error
