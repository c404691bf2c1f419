"""What travels between a caller and its ranks: functions by cloudpickle, results compact, the caller's environment."""

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
    """Pickles a tensor's own elements, not the whole storage it is a view of."""

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
            return import_module, (obj.__name__,)  # cloudpickle takes torch.ops for one made by hand
        return super().reducer_override(obj)


def dumps(value) -> bytes:
    buffer = io.BytesIO()
    _CompactPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


loads = cloudpickle.loads


class CallerEnvironment(NamedTuple):
    """Where the caller stands: a rank takes over its import path, working directory and environment."""

    path: list[str]
    directory: str
    environment: dict[str, str]
    argv: list[str]

    @classmethod
    def here(cls) -> CallerEnvironment:
        return cls(list(sys.path), os.getcwd(), dict(os.environ), list(sys.argv))


class CallerModules:
    """The caller's own modules as this process has imported them; stale ones are forgotten, to be imported afresh."""

    def __init__(self):
        self._seen: dict[str, tuple[int, int]] = {}  # name -> (time, size) of its file when it was imported
        self._place: tuple | None = None  # where the caller looked for modules

    def remember(self) -> None:
        for name, file in _own_modules():
            if name not in self._seen:
                self._seen[name] = _stamp(file)

    def forget_stale(self, caller: CallerEnvironment) -> None:
        """Where one was edited, or might now be another file, all go: others may have imported names from it."""
        own, place = dict(_own_modules()), (caller.path, caller.directory)
        edited = any(_stamp(own[name]) != stamp for name, stamp in self._seen.items() if name in own)
        if edited or place != self._place:
            for name, file in own.items():
                sys.modules.pop(name, None)
                # An edit of the same length within the same second leaves a byte-code file that looks fresh.
                Path(cache_from_source(file)).unlink(missing_ok=True)
            self._seen.clear()
        self._place = place


def _own_modules():
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and os.path.isabs(file) and is_own(file):
            yield name, file


def is_own(file: str) -> bool:
    """Is this file the caller's: neither Python's, nor installed, nor minipar's?"""
    return not (any(p in file for p in _INSTALLED) or os.path.abspath(file).startswith(_LIBRARIES))


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
        return status.st_mtime_ns, status.st_size
    except OSError:
        return 0, 0
