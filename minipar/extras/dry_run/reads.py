"""Methods of torch that answer otherwise in a dry run: those that read a tensor without values, and a few about its memory.

They are replaced for as long as a dry run lasts, and act as always on a thread that runs no rank. A function mode of torch
could see the same calls, but it would be called for every function and attribute, which takes a third of a dry run's time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import collectives
from minipar.comm.transport.errors import require_device
from minipar.extras.dry_run.assumed import ASSUMED
from minipar.extras.dry_run.record import Refused
from minipar.extras.dry_run.shapes import KnownShapes
from minipar.extras.dry_run.tensors import DryTensors

aten = torch.ops.aten
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy")


class AllRanks:
    """State shared by all ranks of a dry run. As a context, it replaces the methods of torch that this module is about."""

    def __init__(self) -> None:
        self.watchers: list[DryTensors] = []
        self.shapes = KnownShapes()
        self._running = threading.local()  # .tensors: the mode of the rank that runs in this thread

    @contextmanager
    def without_contents(self) -> Iterator[DryTensors]:
        """Return a context in which this thread runs a rank's program on tensors without values."""
        tensors = self._running.tensors = DryTensors(self.shapes)
        self.watchers.append(tensors)
        with tensors:
            try:
                yield tensors
            finally:
                del self._running.tensors

    def __enter__(self) -> AllRanks:
        storage = torch.UntypedStorage
        replaced: list[tuple[Any, str, Any]] = [
            *((Tensor, name, self._read(getattr(Tensor, name))) for name in READS),
            (Tensor, "pin_memory", self._in_a_rank(lambda x, *args: x, Tensor.pin_memory)),
            (Tensor, "data_ptr", _data_ptr(Tensor.data_ptr)),
            (storage, "data_ptr", _storage_data_ptr(storage.data_ptr)),
            (storage, "resize_", self._resize(storage.resize_)),
            # The tensors of a dry run are on the meta device.
            (collectives, "require_device", self._in_a_rank(lambda *args: None, require_device)),
            (F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)),
        ]
        self._replaced = ExitStack()
        for owner, name, function in replaced:
            self._replaced.enter_context(mock.patch.object(owner, name, function))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.close()

    def _tensors(self) -> DryTensors | None:
        """Return the mode of the rank that runs in this thread, or None."""
        return getattr(self._running, "tensors", None)

    def _read(self, method: Any) -> Callable[..., Any]:
        def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            tensors = self._tensors()
            if tensors is None or tensors.has_contents(x):
                return method(x, *args, **kwargs)
            return _assume(tensors, x, sys._getframe(1))

        return read

    def _in_a_rank(self, function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls `function` on a thread that runs a rank, and `elsewhere` on any other."""
        return lambda *args: (elsewhere if self._tensors() is None else function)(*args)

    def _resize(self, method: Any) -> Callable[[torch.UntypedStorage, int], Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = method(storage, size)
            for watcher in self.watchers:
                watcher.resized(storage._cdata, storage.nbytes())
            return resized

        return resize


# Torch returns 0 as the address of all that is on the meta device, but the library compares addresses.


def _data_ptr(method: Any) -> Callable[[Tensor], Any]:
    return lambda x: (
        _made_up(x.untyped_storage()) + x.storage_offset() * x.itemsize if x.is_meta else method(x)
    )


def _storage_data_ptr(method: Any) -> Callable[[torch.UntypedStorage], Any]:
    return lambda storage: _made_up(storage) if storage.device.type == "meta" else method(storage)


def _made_up(storage: torch.UntypedStorage) -> Any:
    """Return the address at which the storage's memory is taken to begin, 2^48 bytes or more from every other storage's.

    The address of the storage's own object will not do: these objects lie so close together that a tensor some kilobytes
    into one storage would now and then have the address of another one, depending on what the process has done before.
    """
    return storage._cdata << 48


def _attention(function: Any) -> Callable[..., Any]:
    def attention(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.is_meta and kwargs.get("attn_mask") is None:
            # On the meta device torch would choose the implementation that stores all scores; in a run it uses a kernel.
            return aten._scaled_dot_product_flash_attention_for_cpu(q, *args, 0.0, kwargs["is_causal"])[0]
        return function(q, *args, **kwargs)

    return attention


def _assume(tensors: DryTensors, x: Tensor, frame: FrameType | None) -> Any:
    """Return the value that is assumed for a read in this frame, or in its caller. Raises Refused if there is none."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("minipar."):
        frame = frame.f_back
    assert frame is not None
    module, function = frame.f_globals["__name__"], frame.f_code.co_name
    for assumption in ASSUMED:
        if assumption.module == module and assumption.function == function:
            tensors.assumed.add(assumption.words)
            return assumption.value(x, frame)
    raise Refused(
        f"{module}.{function} (line {frame.f_lineno}) decides by numbers that only a real run has, and a dry run "
        "assumes nothing about them; leave out the option that needs it"
    )
