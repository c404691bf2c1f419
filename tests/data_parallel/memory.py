"""Bytes of the storages that are alive: found by looking, not by asking whoever is being tested."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that some tensor of this process has now."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_meta]
    return {(s := x.untyped_storage())._cdata: s for x in tensors}


@contextmanager
def newer_objects_only() -> Iterator[None]:
    """Inside, `storages` looks at what was made inside: a look takes milliseconds, not tenths of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def held_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the storages made since `before = storages()`, as large as they are now. `before` keeps the others alive."""
    return sum(s.nbytes() for key, s in storages().items() if key not in before)


class Peak(TorchDispatchMode):
    """The most bytes that were alive after any operation: of all storages that operations made or were given.

    A storage counts with the size it has at that moment, so that memory given up by `resize_(0)` is seen to be.
    """

    def __init__(self):
        super().__init__()
        self.peak, self._seen = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                self._seen[x.untyped_storage()._cdata] = x.untyped_storage()._weak_ref()
        self.peak = max(self.peak, self._now())
        return result

    def _now(self) -> int:
        total = 0
        for key, weak in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total
