"""Messages between a caller and its ranks: functions by cloudpickle, compact tensors, the caller's environment."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import types
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import torch

_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen", "<string>")


class _CompactPickler(cloudpickle.Pickler):
    """A pickler that writes a tensor's own elements, not the whole storage that it is a view of."""

    def reducer_override(self, obj):
        if (
            isinstance(obj, torch.Tensor)
            and not obj.is_sparse
            and obj.untyped_storage().nbytes() > obj.nbytes
        ):
            with torch.no_grad():
                copy = obj.detach().clone().requires_grad_(obj.requires_grad)
            if type(obj) is torch.nn.Parameter:
                copy = torch.nn.Parameter(copy.detach(), obj.requires_grad)
            copy.__dict__.update(obj.__dict__)
            return copy.__reduce_ex__(2)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return import_module, (obj.__name__,)  # cloudpickle would pickle torch.ops by value
        return super().reducer_override(obj)


def dumps(value) -> bytes:
    buffer = io.BytesIO()
    _CompactPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


loads = cloudpickle.loads


class CallerEnvironment(NamedTuple):
    """The caller's import path, working directory, environment variables and argv, which a rank takes over."""

    path: list[str]
    directory: str
    environment: dict[str, str]
    argv: list[str]

    @classmethod
    def here(cls) -> CallerEnvironment:
        return cls(list(sys.path), os.getcwd(), dict(os.environ), list(sys.argv))


class CallerModules:
    """The caller's own modules that this process has imported; stale ones are removed, to be imported again."""

    def __init__(self):
        self._seen: dict[str, tuple[int, int]] = {}  # name -> (mtime, size) of its file when imported
        self._place: tuple | None = None  # the last caller's import path and working directory

    def remember(self) -> None:
        for name, file in _own_modules():
            if name not in self._seen:
                self._seen[name] = _stamp(file)

    def forget_stale(self, caller: CallerEnvironment) -> None:
        """Remove all of them if one was edited or may now be another file: the others may have imported names from it."""
        own, place = dict(_own_modules()), (caller.path, caller.directory)
        edited = any(_stamp(own[name]) != stamp for name, stamp in self._seen.items() if name in own)
        if edited or place != self._place:
            for name, file in own.items():
                sys.modules.pop(name, None)
                # After an edit of the same length within the same second, the old byte-code file still looks valid.
                Path(cache_from_source(file)).unlink(missing_ok=True)
            self._seen.clear()
        self._place = place


def _own_modules():
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and os.path.isabs(file) and is_own(file):
            yield name, file


def is_own(file: str) -> bool:
    """Return whether a file is the caller's own: not Python's, not installed, not minipar's."""
    return not (any(p in file for p in _INSTALLED) or os.path.abspath(file).startswith(_LIBRARIES))


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
        return status.st_mtime_ns, status.st_size
    except OSError:
        return 0, 0
