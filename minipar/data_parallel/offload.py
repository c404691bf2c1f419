"""Memory for tensors that are only needed once per step: the device's own, the host's, or a file.

    Memory    ordinary memory, on the parameters' device
    Host      pinned CPU memory; the optimizer then also runs on the CPU (ZeRO-Offload)
    Disk      a file: a chunk is read before its update, and written after it, while other chunks are updated

    disk      | read 1 | read 2 |   | write 1 | read 3 |  | write 2 | read 4 |        one thread, in this order
    main               | update 1 . | update 2 . . . . .  | update 3 . . . . .

Source: ZeRO-Offload, arXiv:2101.06840, section 4; ZeRO-Infinity, arXiv:2104.07857, section 5 and 6.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.data_parallel.scratch_file import ScratchFile
from minipar.errors import one_of
from minipar.trace import Trace, span

Tensors = dict[str, Tensor]  # of one chunk: its master weights and its states, each a whole chunk [n/p]
ALIGNMENT_BYTES = 64


class Memory:
    """Ordinary memory. `device` is the device of the copies that `copy_of` makes; None: the original's."""

    device: torch.device | None = None
    moves_optimizer_state = False  # must state that the optimizer makes in ordinary memory be moved here?

    def copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.detach().to(dtype, copy=True)

    def announce(self, x: Tensor) -> None:
        """Tell the operating system that `copy_to` will be asked for this tensor."""

    def copy_to(self, target: Tensor, x: Tensor) -> None:
        target.copy_(x)

    def prefetch(self, resting: Tensors, trace: Trace | None = None) -> None:
        """Begin to read the tensors, which `load` will be asked for."""

    def load(self, resting: Tensors, trace: Trace | None = None) -> Tensors:
        """Return tensors with these values in ordinary memory: the same ones where they are there."""
        return resting

    def store(self, resting: Tensors, trace: Trace | None = None) -> None:
        """Begin to write back what `load` returned for them. Nobody may look at them until `finish`."""

    def finish(self) -> None:
        """Wait until all is written. Raises what went wrong."""

    def forget(self) -> None:
        """After an error, wait for the writes begun, and forget what was read and not written back."""


class Host(Memory):
    """The CPU's memory, pinned where it is copied to a GPU."""

    device = torch.device("cpu")

    def copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(x.shape, dtype=dtype, pin_memory=x.is_cuda).copy_(x.detach())


class Staged(NamedTuple):
    """The tensors of a chunk in a buffer: being read or, later, in use."""

    tensors: Tensors
    buffer: Tensor
    reading: Future


class Disk(Memory):
    """A file in `folder`, and a thread that reads and writes it.

    Between a `finish` and the next `load`, the tensors can be used as any others; they are then read from the file, and
    take no memory that the operating system cannot take back.

    Holds two buffers with a chunk's tensors each, which are used in turn, pinned where they are copied to a GPU. With K
    tensors in all and chunks of at most c bytes, 2 K c bytes stay resident, however many chunks there are: the chunk that
    is updated is in one, and in the other the last one is written, then the next one read.
    """

    device = torch.device("cpu")
    moves_optimizer_state = True

    def __init__(self, folder: str | None):
        self._file = ScratchFile(folder)
        self._thread = ThreadPoolExecutor(1, "offload")
        self._pinned = False
        self._free: list[Tensor] = []
        self._staged: dict[
            int, Staged
        ] = {}  # address of a chunk's first tensor in the file -> the chunk, read ahead
        self._loaded: dict[int, Staged] = {}  # the same, in use
        self._writing: list[Future] = []

    def copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        self._pinned |= x.is_cuda
        value = x.detach().to("cpu", dtype).reshape(-1)
        return (self._file.add(value) if x.numel() else value.clone()).view(x.shape)

    def announce(self, x: Tensor) -> None:
        if x in self._file:
            self._file.announce(x)

    def copy_to(self, target: Tensor, x: Tensor) -> None:
        if x not in self._file:
            target.copy_(x)
            return
        buffer = self._buffer(x.nbytes)
        value = _cut(buffer, {"": x})[""]
        self._file.read(x, value)
        target.copy_(value)
        self._free.append(buffer)

    def prefetch(self, resting: Tensors, trace: Trace | None = None) -> None:
        inside = self._inside(resting)
        if inside and _key(inside) not in self._staged:
            buffer = self._buffer(sum(map(_room, inside.values())))
            tensors = _cut(buffer, inside)
            reading = self._thread.submit(self._read, inside, tensors, trace)
            self._staged[_key(inside)] = Staged(tensors, buffer, reading)

    def load(self, resting: Tensors, trace: Trace | None = None) -> Tensors:
        inside = self._inside(resting)
        if not inside:
            return dict(resting)
        self.prefetch(resting, trace)
        staged = self._loaded[_key(inside)] = self._staged.pop(_key(inside))
        with span(trace, "wait", "read of states"):
            staged.reading.result()
        return {**resting, **staged.tensors}

    def store(self, resting: Tensors, trace: Trace | None = None) -> None:
        inside = self._inside(resting)
        staged = self._loaded.pop(_key(inside), None) if inside else None
        if staged is not None:
            pairs = [(inside[name], x) for name, x in staged.tensors.items()]
            self._writing.append(self._thread.submit(self._write, pairs, trace))
            self._free.append(staged.buffer)  # for a read that comes after that write

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
        """Take a free buffer, or make one."""
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
    """Lay tensors of these sizes out in a buffer of bytes."""
    tensors, start = {}, 0
    for name, x in like.items():
        tensors[name] = buffer[start : start + x.nbytes].view(x.dtype)
        start += _room(x)
    return tensors


def memory_for(offload: str | None, folder: str | None) -> Memory:
    """The memory an `offload=` argument asks for."""
    choices = {None: Memory, "cpu": Host, "disk": lambda: Disk(folder)}
    if offload not in choices:
        raise ValueError(f"offload={offload!r} is unknown; use {one_of(['None', 'cpu', 'disk'])}")
    if folder is not None and offload != "disk":
        raise ValueError(f"folder={folder!r} is for offload='disk', not offload={offload!r}")
    return choices[offload]()
