"""What a run leaves behind, written so that nobody ever reads half a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def prepare_folder(folder: Path) -> None:
    """Make the folder and try to write to it. Raises ValueError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out={folder} cannot be written to: {error.strerror}") from None


def write_whole(path: Path, content: bytes | str) -> None:
    """Write beside, flush to the disk, then rename: the file is there whole, or as it was before."""
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
