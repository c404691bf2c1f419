"""State that a rank takes over from its caller: import path, folder, environment, argv, latest source of its modules."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType
from typing import Any, NamedTuple

_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen", "<string>")


class CallerEnvironment(NamedTuple):
    """The caller's import path, working directory, environment variables and argv, which a rank takes over."""

    path: list[str]
    directory: str
    environment: dict[str, str]
    argv: list[str]

    @classmethod
    def here(cls) -> CallerEnvironment:
        """Raises ValueError if the working directory no longer exists: ranks would go on in that of an earlier run."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            raise ValueError(
                "the working folder of this process has been removed; call os.chdir with one that exists"
            ) from None
        return cls(list(sys.path), directory, dict(os.environ), list(sys.argv))


class CallerModules:
    """The caller's own modules that this process has imported. Modules edited since are removed, to be imported again.

    They are compiled from their sources each time: after an edit of the same length within the same second, an old
    byte-code file still looks valid. No byte code is written or removed in the caller's folders.
    """

    def __init__(self) -> None:
        self._files: dict[str, str] = {}  # name -> its file, also where the import failed
        sys.meta_path.insert(0, _FromSource(self._files))
        self._seen: dict[str, tuple[int, int]] = {}  # name -> (mtime, size) of its file when imported
        # the last caller's import path and working directory
        self._place: tuple[list[str], str] | None = None

    def remember(self) -> None:
        for name, file in self._files.items():
            if name not in self._seen:
                self._seen[name] = _stamp(file)

    def forget_stale(self, caller: CallerEnvironment) -> None:
        """If one of these modules was edited or may be another file, remove all: they may import names from each other."""
        place = (caller.path, caller.directory)
        edited = any(_stamp(self._files[name]) != stamp for name, stamp in self._seen.items())
        if edited or place != self._place:
            for name in self._files:
                sys.modules.pop(name, None)
            importlib.invalidate_caches()
            self._files.clear()
            self._seen.clear()
        self._place = place


class _FromSource:
    """An import hook that finds what Python's own hooks find, and reads the caller's modules without byte code."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files  # the caller's modules that were asked for: name -> file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        others = (finder.find_spec for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and type(spec.loader) is SourceFileLoader and spec.origin and is_own(spec.origin):
            spec.loader = _SourceLoader(name, spec.origin)
            spec.cached = None
            self._files[name] = spec.origin
        return spec


class _SourceLoader(SourceFileLoader):
    def get_code(self, name: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def is_own(file: str) -> bool:
    """Return whether a file is the caller's own: not Python's, not installed, not minipar's."""
    return not (any(p in file for p in _INSTALLED) or os.path.abspath(file).startswith(_LIBRARIES))


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
        return status.st_mtime_ns, status.st_size
    except OSError:
        return 0, 0
