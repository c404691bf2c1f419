"""How many bytes of tensors are alive, and how many were at the worst moment: counted, on a machine that has no counter.

    with LiveBytes() as memory:
        model.loss(tokens, targets).backward()
    memory.peak

Counts every storage that an operation makes while it is on, in this thread and in autograd's, once however many tensors
share it, from its making to its end. What existed before is not counted; neither is what a kernel keeps to itself.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context in which `now` and `peak` are the bytes of the storages made in it."""

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
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before | self._alive:
                self._made(x.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._alive.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._ended, key, num_bytes)

    def _ended(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= num_bytes
