"""What a run leaves behind, written so that nobody ever reads half a file."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from pathlib import Path

import torch


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


def gather_values(comm, value) -> list | None:
    """Any value of every rank, on rank 0; None elsewhere. Travels pickled, as bytes."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(comm.device)
    sizes = comm.all_gather(torch.tensor([len(data)], device=comm.device)).tolist()
    if comm.rank:
        comm.send(data, 0)
        return None
    arrived = [data, *(comm.recv((n,), torch.uint8, source) for source, n in enumerate(sizes) if source)]
    return [pickle.loads(x.cpu().numpy().tobytes()) for x in arrived]
