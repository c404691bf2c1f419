"""Bytes of the storages that are alive, found through the garbage collector, not asked of the implementation under test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storage of every tensor of this process, and of every gradient, by its address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    # A gradient may be held by C++ only, where gc does not see it.
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    # A sparse tensor has no storage of its own: its indices and values are tensors, too.
    tensors = [x for x in tensors if x.layout == torch.strided and not x.is_meta]
    return {(s := x.untyped_storage())._cdata: s for x in tensors}


@contextmanager
def newer_objects_only() -> Iterator[None]:
    """Within this context, make `storages` search only newer objects: milliseconds, not tenths of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def held_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes, now, of the storages made since `before = storages()`, which keeps the older addresses in use."""
    return sum(s.nbytes() for key, s in storages().items() if key not in before)
