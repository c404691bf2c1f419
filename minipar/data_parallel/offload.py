"""Memory for tensors that are only needed once per step: the device's own, the host's, or a file's pages.

    Memory    ordinary memory, on the parameters' device
    Host      pinned CPU memory; the optimizer then also runs on the CPU (ZeRO-Offload)
    Disk      memory-mapped files; the pages of a chunk are fetched before the chunk is updated and released after

Source: ZeRO-Offload, arXiv:2101.06840, section 4; the idea of ZeRO-Infinity, arXiv:2104.07857, section 5.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor

from minipar.errors import one_of


class Memory:
    """Ordinary memory. `device` is the device of the copies that `copy_of` makes; None: the original's."""

    device: torch.device | None = None
    moves_optimizer_state = False  # must state that the optimizer makes in ordinary memory be moved here?

    def copy_of(self, x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        return x.detach().to(dtype, copy=True)

    def fetch(self, tensors: Iterable[Tensor]) -> None:
        """Announce that these tensors will be used soon."""

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Announce that these tensors will not be used for a while."""


class Host(Memory):
    """The CPU's memory, pinned where there is a GPU to copy from it."""

    device = torch.device("cpu")

    def copy_of(self, x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        copy = torch.empty(x.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        return copy.copy_(x.detach())


class Disk(Memory):
    """Files in `folder`, mapped into memory; they have no names, and are deleted when the process ends.

    A released page is not resident. The kernel writes it to the file at any time, and reads it back on access.
    """

    device = torch.device("cpu")
    moves_optimizer_state = True

    def __init__(self, folder: str | None):
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}  # address -> mapping

    def copy_of(self, x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        if x.numel() == 0:
            return x.detach().to("cpu", dtype)
        num_bytes = x.numel() * dtype.itemsize
        with tempfile.TemporaryFile(dir=self._folder, prefix=f"minipar-{name}-") as file:
            file.truncate(num_bytes)
            mapping = mmap.mmap(file.fileno(), num_bytes)
        tensor = torch.frombuffer(mapping, dtype=dtype)
        self._maps[tensor.data_ptr()] = mapping
        tensor.copy_(x.detach().view(-1))
        self.release([tensor])
        return tensor.view(x.shape)

    def fetch(self, tensors: Iterable[Tensor]) -> None:
        self._advise(tensors, "MADV_WILLNEED")

    def release(self, tensors: Iterable[Tensor]) -> None:
        self._advise(tensors, "MADV_DONTNEED")  # the mapping is shared: data written to it stays in the file

    def _advise(self, tensors: Iterable[Tensor], advice: str) -> None:
        for tensor in tensors:
            mapping = self._maps.get(tensor.data_ptr())
            if mapping is not None and hasattr(mmap, advice):
                mapping.madvise(getattr(mmap, advice))


def memory_for(offload: str | None, folder: str | None) -> Memory:
    """The memory an `offload=` argument asks for."""
    choices = {None: Memory, "cpu": Host, "disk": lambda: Disk(folder)}
    if offload not in choices:
        raise ValueError(f"offload={offload!r} is unknown; use {one_of(['None', 'cpu', 'disk'])}")
    if folder is not None and offload != "disk":
        raise ValueError(f"folder={folder!r} is for offload='disk', not offload={offload!r}")
    return choices[offload]()
