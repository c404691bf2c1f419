"""Bytes of the live tensors, found through the garbage collector, without help from the implementation under test."""

from __future__ import annotations

import gc

import torch

from minipar.support.live_bytes import exists


def storages() -> dict[int, torch.UntypedStorage]:
    """Return address -> storage, for all tensors and gradients of this process; in a rank, for those since its fork.

    A DTensor has no memory: it is a wrapper of the tensor that is this rank's part, which is counted.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    # A gradient may be held by C++ alone, where gc does not see it.
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    # A sparse tensor has no storage of its own: its indices and values are tensors, too.
    tensors = [x for x in tensors if x.layout == torch.strided and not x.is_meta]
    return {storage._cdata: storage for x in tensors if exists(storage := x.untyped_storage())}


def held_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of live storages made since `before = storages()`, which keeps old addresses from being reused."""
    return sum(s.nbytes() for key, s in storages().items() if key not in before)
