"""Functions that act otherwise in a dry run: reads of tensors without values, what is assumed, and a few about memory.

They are replaced for as long as a dry run lasts, and act as always on a thread that runs no rank. A function mode of torch
could see the same calls, but it would be called for every function and attribute, which takes a third of a dry run's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from minipar.comm.transport.checked import OF_ONE_SHAPE
from minipar.extras.dry_run.assumed import ASSUMED, Assumption
from minipar.extras.dry_run.record import Unknown
from minipar.extras.dry_run.tensors import DryTensors


@contextmanager
def replaced() -> Iterator[None]:
    """Make a context in which the functions that this module is about are replaced."""
    with ExitStack() as stack:
        for name, instead in REPLACED.items():
            stack.enter_context(mock.patch(name, _in_a_dry_run(resolve_name(name), instead)))
        yield


def _in_a_dry_run(original: Any, instead: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, DryTensors):
                return instead(mode, original, *args, **kwargs)
        return original(*args, **kwargs)

    return function


def _read(tensors: DryTensors, method: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not tensors.has_contents(x):
        raise Unknown("it reads numbers that only a real run has")
    return method(x, *args, **kwargs)


def _assume(assumption: Assumption, tensors: DryTensors, function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or tensors.has_contents(result):
            return result
        del result  # its memory
    except Unknown:
        pass
    tensors.assumed.add(assumption.words)
    return assumption.result(*args, **kwargs)


def _resize(tensors: DryTensors, method: Any, storage: torch.UntypedStorage, size: int) -> Any:
    resized = method(storage, size)
    tensors.resized(storage._cdata, storage.nbytes())
    return resized


# Torch returns 0 as the address of all that is on the meta device, but the library compares addresses.


def _data_ptr(tensors: DryTensors, method: Any, x: Tensor) -> Any:
    return x.untyped_storage().data_ptr() + x.storage_offset() * x.itemsize if x.is_meta else method(x)


def _storage_data_ptr(tensors: DryTensors, method: Any, storage: torch.UntypedStorage) -> Any:
    """Return the address at which the storage's memory is taken to begin, 2^48 bytes or more from every other storage's.

    The address of the storage's own object will not do: these objects lie so close together that a tensor some kilobytes
    into one storage would now and then have the address of another one, depending on what the process has done before.
    """
    return storage._cdata << 48 if storage.device.type == "meta" else method(storage)


def _attention(tensors: DryTensors, function: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
    if q.is_meta and kwargs.get("attn_mask") is None:
        # On the meta device torch would choose the implementation that stores all scores; in a run it uses a kernel.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, *args, 0.0, kwargs["is_causal"])[0]
    return function(q, *args, **kwargs)


def _collective(
    tensors: DryTensors, method: Any, comm: Any, kind: str, signature: str, shape: Any, operation: Any
) -> Any:
    """Run a collective, and describe it in the record of its operation."""
    of_shape = f" of {list(shape)}" if shape is not None and kind in OF_ONE_SHAPE else ""
    comm._transport.running[-1].words = signature + of_shape
    return method(comm, kind, signature, shape, operation)


READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy")
# Name of a function -> what is called in its place, with the rank's tensors, the function, and its arguments.
REPLACED: dict[str, Callable[..., Any]] = {
    **{f"torch.Tensor.{name}": _read for name in READS},
    **{assumption.function: partial(_assume, assumption) for assumption in ASSUMED},
    "torch.Tensor.pin_memory": lambda tensors, method, x, *args: x,
    "torch.Tensor.data_ptr": _data_ptr,
    "torch.UntypedStorage.data_ptr": _storage_data_ptr,
    "torch.UntypedStorage.resize_": _resize,
    "torch.nn.functional.scaled_dot_product_attention": _attention,
    "minipar.comm.point_to_point.PointToPoint._run_labelled": _collective,
    # The tensors of a dry run are on the meta device.
    "minipar.comm.collectives.require_device": lambda tensors, function, *args: None,
}
