"""Matrix products, counted."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}


class CountProducts(TorchDispatchMode):
    """Matrix products by operator and shapes."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    @property
    def count(self) -> int:
        return sum(self.seen.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
            self.seen[str(func), shapes] += 1
        return func(*args, **(kwargs or {}))
