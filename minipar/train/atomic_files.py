"""Files written atomically, so that no reader ever sees half a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def prepare_folder(folder: Path) -> None:
    """Create the folder and try to write to it. Raises ValueError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out={folder} cannot be written to: {error.strerror}") from None


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a temporary file, flush it to the disk, rename it: `path` has all of `content`, or is unchanged."""
    content = content.encode() if isinstance(content, str) else content
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
