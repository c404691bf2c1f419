"""Memory for tensors that are needed only once per step: the device's own memory, the host's, or a file.

    Memory    ordinary memory, on the parameters' device
    Host      pinned CPU memory; the optimizer then also runs on the CPU (ZeRO-Offload)
    Disk      a file; a chunk is read before its update and written after it, while other chunks are updated

    disk      | read 1 | read 2 |   | write 1 | read 3 |  | write 2 | read 4 |        one thread, in this order
    main               | update 1 . | update 2 . . . . .  | update 3 . . . . .

Source: ZeRO-Offload, arXiv:2101.06840, section 4; ZeRO-Infinity, arXiv:2104.07857, section 5 and 6.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.data_parallel.memory import Memory, Tensors
from minipar.extras.offload.scratch_file import ScratchFile
from minipar.support.trace import Trace, span

ALIGNMENT_BYTES = 64


class Host(Memory):
    """CPU memory, pinned if its tensors are copied to a GPU."""

    device = torch.device("cpu")

    def copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(x.shape, dtype=dtype, pin_memory=x.is_cuda).copy_(x.detach())


class Staged(NamedTuple):
    """The tensors of a chunk in a buffer. `reading` is done once they have been read from the file."""

    tensors: Tensors
    buffer: Tensor
    reading: Future[None]


class Disk(Memory):
    """A file in `folder`, and a thread that reads and writes it.

    Between a `finish` and the next `load`, the tensors can be used like any others. The operating system then reads them
    from the file into its page cache, which it can reclaim.

    Holds two buffers, used in turn, each for the tensors of one chunk. They are pinned if they are copied to a GPU. While
    the chunk in one buffer is updated, the previous chunk is written from the other buffer to the file, and then the next
    chunk is read into that buffer. With K tensors in a chunk, each of at most c bytes, 2 K c bytes stay resident, however
    many chunks there are.
    """

    device = torch.device("cpu")
    moves_optimizer_state = True

    def __init__(self, folder: str | None):
        self._file = ScratchFile(folder)
        self._thread = ThreadPoolExecutor(1, "offload")
        self._pinned = False
        self._free: list[Tensor] = []
        # Chunks that are read ahead, and chunks in use, by the address of their first tensor in the mapped file.
        self._staged: dict[int, Staged] = {}
        self._loaded: dict[int, Staged] = {}
        self._writing: list[Future[None]] = []

    def copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        self._pinned |= x.is_cuda
        value = x.detach().to("cpu", dtype).reshape(-1)
        return (self._file.add(value) if x.numel() else value.clone()).view(x.shape)

    def advise_read(self, x: Tensor) -> None:
        if x in self._file:
            self._file.advise_read(x)

    def copy_to(self, target: Tensor, x: Tensor) -> None:
        if x not in self._file:
            target.copy_(x)
            return
        buffer = self._buffer(x.nbytes)
        value = _cut(buffer, {"": x})[""]
        self._file.read(x, value)
        target.copy_(value)
        self._free.append(buffer)

    def prefetch(self, offloaded: Tensors, trace: Trace | None = None) -> None:
        inside = self._inside(offloaded)
        if inside and _key(inside) not in self._staged:
            buffer = self._buffer(sum(map(_room, inside.values())))
            tensors = _cut(buffer, inside)
            reading = self._thread.submit(self._read, inside, tensors, trace)
            self._staged[_key(inside)] = Staged(tensors, buffer, reading)

    def load(self, offloaded: Tensors, trace: Trace | None = None) -> Tensors:
        inside = self._inside(offloaded)
        if not inside:
            return dict(offloaded)
        self.prefetch(offloaded, trace)
        staged = self._loaded[_key(inside)] = self._staged.pop(_key(inside))
        with span(trace, "wait", "read of states"):
            staged.reading.result()
        return {**offloaded, **staged.tensors}

    def store(self, offloaded: Tensors, trace: Trace | None = None) -> None:
        inside = self._inside(offloaded)
        staged = self._loaded.pop(_key(inside), None) if inside else None
        if staged is not None:
            pairs = [(inside[name], x) for name, x in staged.tensors.items()]
            self._writing.append(self._thread.submit(self._write, pairs, trace))
            # The buffer is free for the next read: the thread that writes from it also does that read, after the write.
            self._free.append(staged.buffer)

    def release(self, offloaded: Tensors) -> None:
        inside = self._inside(offloaded)
        if inside:
            self._free.append(self._loaded.pop(_key(inside)).buffer)

    def finish(self) -> None:
        writing, self._writing = self._writing, []
        for written in writing:
            written.result()

    def forget(self) -> None:
        wait([*self._writing, *(staged.reading for staged in self._staged.values())])
        self._writing.clear()
        self._staged.clear()
        self._loaded.clear()

    def _inside(self, tensors: Tensors) -> Tensors:
        return {name: x for name, x in tensors.items() if x in self._file}

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return a free buffer of at least `num_bytes`, or allocate one."""
        buffer = self._free.pop(0) if self._free else torch.empty(0)
        if buffer.nbytes >= num_bytes:
            return buffer
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _read(self, stored: Tensors, into: Tensors, trace: Trace | None) -> None:
        with span(trace, "disk", "read", "offload"):
            for name, x in stored.items():
                self._file.read(x, into[name])

    def _write(self, pairs: list[tuple[Tensor, Tensor]], trace: Trace | None) -> None:
        with span(trace, "disk", "write", "offload"):
            for stored, value in pairs:
                self._file.write(stored, value)


def _key(inside: Tensors) -> int:
    return next(iter(inside.values())).data_ptr()


def _room(x: Tensor) -> int:
    return -(-x.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _cut(buffer: Tensor, like: Tensors) -> Tensors:
    """Return views of a byte buffer, one after another, with the sizes and dtypes of `like`."""
    tensors, start = {}, 0
    for name, x in like.items():
        tensors[name] = buffer[start : start + x.nbytes].view(x.dtype)
        start += _room(x)
    return tensors
