"""Current and peak bytes of live tensors: counted by storage on a CPU, whose allocator keeps no count, else by torch.

    with LiveBytes() as memory:
        model.loss(tokens, targets).backward()
    memory.peak

Counts every storage that an operation allocates inside the context, in this thread and in autograd's, from its
allocation until it is freed; once, however many tensors share it. Storages that existed before, and memory that a kernel
allocates internally, are not counted.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of the storages allocated inside it: `now` are alive, `peak` is the maximum."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            allocates = isinstance(x, torch.Tensor) and not x.is_meta
            if allocates and x.untyped_storage()._cdata not in before | self._alive:
                self._on_allocate(x.untyped_storage())
        return result

    def _on_allocate(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._alive.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._on_free, key, num_bytes)

    def _on_free(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= num_bytes


class AllocatedBytes:
    """Context manager that counts as `LiveBytes` does, on a GPU, whose allocator keeps the count for all threads."""

    def __init__(self, device: torch.device, cuda=torch.cuda):
        self._device, self._cuda = device, cuda

    def __enter__(self):
        self._before = self._cuda.memory_allocated(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error):
        self._peak = self._cuda.max_memory_allocated(self._device) - self._before

    @property
    def now(self) -> int:
        return self._cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return self._peak


def counted_bytes(device: torch.device) -> LiveBytes | AllocatedBytes:
    """Return a context manager that counts the bytes allocated inside it on this device: `now` alive, and their `peak`."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()
