"""The most bytes that are alive at once, memory given up by `resize_(0)` not among them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self._seen[x.untyped_storage()._cdata] = x.untyped_storage()._weak_ref()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, weak in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total
