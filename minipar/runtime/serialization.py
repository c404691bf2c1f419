"""Functions, arguments and results as bytes: functions by cloudpickle, tensors without unused storage."""

from __future__ import annotations

import io
import marshal
import types
from importlib import import_module
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch


class _CompactPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that writes only a tensor's own elements, not the storage it views; GPU tensors become CPU tensors.

    A function's code keeps its file and line, by which tracebacks and `inspect.getsource` find the source.
    """

    def reducer_override(self, obj: Any) -> Any:
        if (
            isinstance(obj, torch.Tensor)
            and obj.layout == torch.strided  # others have no storage of their own
            and not obj.is_meta
            and (obj.is_cuda or obj.untyped_storage().nbytes() > obj.nbytes)
        ):
            with torch.no_grad():
                copy = obj.detach().to("cpu", copy=True).requires_grad_(obj.requires_grad)
            if type(obj) is torch.nn.Parameter:
                copy = torch.nn.Parameter(copy.detach(), obj.requires_grad)
            copy.__dict__.update(obj.__dict__)
            return copy.__reduce_ex__(2)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return import_module, (obj.__name__,)  # cloudpickle would pickle torch.ops by value
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)  # since 3.1.3 cloudpickle leaves out the file
        return super().reducer_override(obj)


def dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _CompactPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


loads = cloudpickle.loads
