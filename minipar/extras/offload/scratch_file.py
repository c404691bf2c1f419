"""An unnamed file for tensors that are not needed in memory. It is deleted when the process ends, however it ends."""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod

import torch
from torch import Tensor

SEGMENT_BYTES = 64 << 20  # large, because each mapped segment needs a file descriptor


class ScratchFile:
    """A file in `folder` (None: the system's folder for temporary files) to which tensors are appended.

    A tensor of the file can be used like any other: the calling thread then reads and writes the file through the page
    cache. `read` and `write` copy a tensor, and may be called from any thread.
    Raises RuntimeError if the disk is full, ValueError if the folder cannot be written to.
    """

    def __init__(self, folder: str | None):
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="minipar-offload-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"folder={folder} cannot be written to: {error.strerror}; use a folder that is there"
            ) from None
        self._folder = folder or tempfile.gettempdir()
        self._end = self._room = 0  # where the last tensor ends, and where the last segment ends
        self._segment: mmap.mmap | None = None
        # tensor's address -> (offset in the file, segment, offset in the segment)
        self._places: dict[int, tuple[int, mmap.mmap, int]] = {}

    def __contains__(self, x: Tensor) -> bool:
        return x.numel() > 0 and x.data_ptr() in self._places

    def add(self, value: Tensor) -> Tensor:
        """Write a copy of a CPU tensor [n] to the file; return the copy, a tensor whose memory is the mapped file."""
        num_bytes = -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._end + num_bytes > self._room:
            self._segment = self._grow(num_bytes)
        assert self._segment is not None
        start, self._end = self._end, self._end + num_bytes
        inside = start - (self._room - len(self._segment))
        stored = torch.frombuffer(self._segment, dtype=value.dtype, count=prod(value.shape), offset=inside)
        self._places[stored.data_ptr()] = start, self._segment, inside
        self.write(stored, value)
        return stored

    def _grow(self, num_bytes: int) -> mmap.mmap:
        """Append a segment to the file, and map it."""
        size = -(-max(num_bytes, SEGMENT_BYTES) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._end, self._room = self._room, self._room + size
        os.ftruncate(self._file.fileno(), self._room)  # takes no disk space until it is written
        return mmap.mmap(self._file.fileno(), size, offset=self._end)

    def advise_read(self, stored: Tensor) -> None:
        """Tell the operating system that this tensor will be read soon."""
        if hasattr(os, "posix_fadvise"):
            start, *_ = self._places[stored.data_ptr()]
            os.posix_fadvise(self._file.fileno(), start, stored.nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, stored: Tensor, into: Tensor) -> None:
        """Copy a tensor of the file into `into`."""
        start, *_ = self._places[stored.data_ptr()]
        bytes_of, done = _bytes(into), 0
        while done < len(bytes_of):
            done += os.preadv(self._file.fileno(), [bytes_of[done:]], start + done)

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Copy `value` into a tensor of the file. Unlike a write through the mapping, this raises if the disk is full."""
        start, segment, inside = self._places[stored.data_ptr()]
        bytes_of, done = _bytes(value), 0
        try:
            while done < len(bytes_of):
                done += os.pwrite(self._file.fileno(), bytes_of[done:], start + done)
        except OSError as error:
            raise RuntimeError(
                f"offload='disk': {len(bytes_of)} bytes could not be written to {self._folder}: {error.strerror}; "
                "use another folder"
            ) from error
        if hasattr(mmap, "MADV_DONTNEED"):  # pages read through the mapping need not stay in memory
            size = -(-len(bytes_of) // mmap.PAGESIZE) * mmap.PAGESIZE
            segment.madvise(mmap.MADV_DONTNEED, inside, size)


def _bytes(x: Tensor) -> memoryview:
    return x.detach().reshape(-1).view(torch.uint8).numpy().data
