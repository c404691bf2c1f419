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
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in a fraction of the time of torch's `tree_leaves`."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


class LiveBytes(TorchDispatchMode):
    """Context manager that counts bytes of storages allocated inside it: `now` is the current sum, `peak` the largest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # storage that is alive -> its bytes

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count([x for x in tensors_in(result) if not x.is_meta], tensors_in(args, kwargs))
        return result

    def count(self, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Count the results' storages, but for those of the inputs and those that are counted already."""
        for x in results:
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self._sizes and all(key != y.untyped_storage()._cdata for y in inputs):
                self._sizes[key] = 0
                self.resized(key, storage.nbytes())
                weakref.finalize(storage, self._on_free, key)

    def resized(self, key: int, num_bytes: int) -> None:
        """Update the count of a storage that now has `num_bytes` bytes."""
        if key in self._sizes:
            self.now += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak = max(self.peak, self.now)

    def _on_free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


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
