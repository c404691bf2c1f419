"""A file without a name, for tensors that are not needed in memory: it is gone with the process, whatever ends that."""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod

import torch
from torch import Tensor

SEGMENT_BYTES = 64 << 20  # mapped at a time, since each mapping keeps a file descriptor


class ScratchFile:
    """A file in `folder` (None: the system's for temporary files) that grows by one tensor after another.

    A tensor of the file is one like any other: reading it reads the file, writing to it writes the file, in the calling
    thread, through the operating system's cache. `read` and `write` do so for all of it at once, from any thread.
    Raises RuntimeError where the folder has no room left, ValueError where it cannot be written to.
    """

    def __init__(self, folder: str | None):
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="minipar-offload-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"folder={folder} cannot be written to: {error.strerror}; use a folder that is there"
            ) from None
        self._folder = folder or tempfile.gettempdir()
        self._end = self._room = 0  # of the tensors, and of the segment in which they end
        self._segment: mmap.mmap | None = None
        self._places: dict[
            int, tuple[int, mmap.mmap, int]
        ] = {}  # address -> in the file, segment, in the segment

    def __contains__(self, x: Tensor) -> bool:
        return x.numel() > 0 and x.data_ptr() in self._places

    def add(self, value: Tensor) -> Tensor:
        """Write a copy of a CPU tensor [n] to the file; return the tensor of the file that has it."""
        num_bytes = -(-value.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._end + num_bytes > self._room:
            self._grow(num_bytes)
        start, self._end = self._end, self._end + num_bytes
        inside = start - (self._room - len(self._segment))
        stored = torch.frombuffer(self._segment, dtype=value.dtype, count=prod(value.shape), offset=inside)
        self._places[stored.data_ptr()] = start, self._segment, inside
        self.write(stored, value)
        return stored

    def _grow(self, num_bytes: int) -> None:
        size = -(-max(num_bytes, SEGMENT_BYTES) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._end, self._room = self._room, self._room + size
        os.ftruncate(self._file.fileno(), self._room)  # takes no room on the disk until it is written
        self._segment = mmap.mmap(self._file.fileno(), size, offset=self._end)

    def announce(self, stored: Tensor) -> None:
        """Tell the operating system that this tensor will be read soon."""
        if hasattr(os, "posix_fadvise"):
            start, *_ = self._places[stored.data_ptr()]
            os.posix_fadvise(self._file.fileno(), start, stored.nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, stored: Tensor, into: Tensor) -> None:
        """Read a whole tensor of the file."""
        start, *_ = self._places[stored.data_ptr()]
        bytes_of, done = memoryview(_bytes(into)), 0
        while done < len(bytes_of):
            done += os.preadv(self._file.fileno(), [bytes_of[done:]], start + done)

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Write a whole tensor of the file. Unlike a write through the mapping, it says so where the disk is full."""
        start, segment, inside = self._places[stored.data_ptr()]
        bytes_of, done = memoryview(_bytes(value)), 0
        try:
            while done < len(bytes_of):
                done += os.pwrite(self._file.fileno(), bytes_of[done:], start + done)
        except OSError as error:
            raise RuntimeError(
                f"offload='disk': {len(bytes_of)} bytes could not be written to {self._folder}: {error.strerror}; "
                "use another folder"
            ) from error
        if hasattr(mmap, "MADV_DONTNEED"):  # what was looked at through the mapping need not stay in memory
            size = -(-len(bytes_of) // mmap.PAGESIZE) * mmap.PAGESIZE
            segment.madvise(mmap.MADV_DONTNEED, inside, size)


def _bytes(x: Tensor):
    return x.detach().reshape(-1).view(torch.uint8).numpy()
