"""Bytes of the storages that are alive: found by looking, not by asking the one that is being tested."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that some tensor of this process has now, or some tensor's gradient."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_meta]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]  # may be known to C++ alone
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
