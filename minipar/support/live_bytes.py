"""Current and peak bytes of live tensors. On a CPU, whose allocator keeps no count, storages are counted here.

    with LiveBytes() as memory:
        model.loss(tokens, targets).backward()
    memory.peak

Counts every storage that an operation allocates inside the context, in this thread and in autograd's, from its
allocation until it is freed. A storage is counted once, however many tensors share it. Storages that existed before, and
memory that a kernel allocates internally, are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context manager that counts bytes of storages allocated inside it: `now` is the current sum, `peak` the largest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if has_wrappers(types):
            return NotImplemented
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) and not x.is_meta else None
            if storage is not None and storage._cdata not in before | self._alive and exists(storage):
                self._on_allocate(storage)
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


def has_wrappers(types: Iterable[type]) -> bool:
    """Return whether an operator is asked of a DTensor: a mode that returns NotImplemented gets those of its parts."""
    return any(hasattr(t, "to_local") for t in types)


def exists(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has memory. A DTensor's and a fake tensor's have none."""
    try:
        return storage.device.type != "meta" and storage.data_ptr() != 0
    except RuntimeError:
        return False


class AllocatedBytes:
    """Context manager like `LiveBytes`, for a GPU: its allocator keeps the count, for all threads."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda

    def __enter__(self) -> Self:
        self._before: int = self._cuda.memory_allocated(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        self._peak: int = self._cuda.max_memory_allocated(self._device) - self._before

    @property
    def now(self) -> int:
        allocated: int = self._cuda.memory_allocated(self._device)
        return allocated - self._before

    @property
    def peak(self) -> int:
        return self._peak


def counted_bytes(device: torch.device) -> LiveBytes | AllocatedBytes:
    """Return a context manager that counts the bytes allocated inside it on this device, as `now` and `peak`."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()
