"""Count the kernels that a GPU would launch for what runs on a CPU here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided")
READS = ("_local_scalar_dense",)  # tests/train/host_waits.py counts these
CHANGES_DTYPE = ("_foreach_copy_",)


class Launches(TorchDispatchMode):
    """A context: `count` kernels so far. A view is none; a list of tensors is one, where it is as ATen needs it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.startswith("_foreach"):
            lists = [x for x in args if isinstance(x, list | tuple) and isinstance(x[0], Tensor)]
            self.count += 1 if _is_one_kernel(name, lists) else len(lists[0])
        elif not function.is_view and name not in ALLOCATES and name not in READS:
            self.count += 1
        return function(*args, **(kwargs or {}))


def _is_one_kernel(name: str, lists) -> bool:
    """Whether the lists are as ATen's `can_use_fast_route` demands; otherwise torch launches a kernel for each tensor."""
    for tensors in lists:
        alike = tensors if name not in CHANGES_DTYPE else lists[0]
        if any((x.dtype, x.device) != (alike[0].dtype, alike[0].device) for x in alike):
            return False
    return all(
        x.shape == y.shape and x.stride() == y.stride() and _is_dense(x)
        for tensors in lists
        for x, y in zip(lists[0], tensors)
    ) and (name in CHANGES_DTYPE or len({tensors[0].dtype for tensors in lists}) == 1)


def _is_dense(x: Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(x)
