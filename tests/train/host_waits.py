"""Find where Python reads a tensor's value: on a GPU the host then waits for it, and enqueues nothing meanwhile."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minipar

ROOT = Path(minipar.__file__).parent.parent
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
# Operations whose result has a size that depends on values, so the host waits for these inside the operation.
SIZED_BY_VALUES = ("nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive")


@contextmanager
def host_waits():
    """A context that counts, by file and function of minipar, the reads of tensors' values, in all threads.

    Every tensor says that it is on a GPU, so that what asks takes the way of a GPU; only memory cannot be pinned here.
    """
    found: Counter[str] = Counter()
    empty = torch.empty
    originals = {name: torch.Tensor.__dict__.get(name, getattr(torch.Tensor, name)) for name in READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, _noting(original, found))
    torch.Tensor.is_cuda = True
    torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)
    try:
        with _SizedByValues(found):
            yield found
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
        del torch.Tensor.is_cuda
        torch.empty = empty


def _noting(original, found):
    def read(self, *args, **kwargs):
        _note(found)
        return original(self, *args, **kwargs)

    return read


def _note(found) -> None:
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if "torch/optim" in file.as_posix():
            return  # torch's optimizers keep their counts of steps on the CPU
        if file.is_relative_to(ROOT / "minipar"):
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            found[f"{file.relative_to(ROOT / 'minipar').as_posix()} {name}"] += 1
            return
        frame = frame.f_back


class _SizedByValues(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_", "index_put") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        by_count = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in SIZED_BY_VALUES or by_mask or by_count:
            _note(self._found)
        return function(*args, **(kwargs or {}))
