"""Files that are written completely or not at all."""

import os
from pathlib import Path

from ..errors import CheckpointError


def write_text(path: Path, text: str) -> None:
    """Writes a file under another name and renames it when it is on disk.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
