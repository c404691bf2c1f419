"""Files written atomically, so that no reader ever sees half a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def prepare_folder(folder: Path) -> None:
    """Create the folder and try to write to it. Raises ValueError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out={folder} cannot be written to: {error.strerror}") from None


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a temporary file, flush it to the disk and rename it, so that `path` has all of `content` or is unchanged."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write to; it becomes `path` when the block ends. After an exception, `path` is unchanged.

    The file gets the usual mode of a new file, set by the process's umask.
    """
    beside = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
