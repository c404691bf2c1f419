"""The state that a rank takes over from its caller: import path, folder, environment, argv, its modules' latest source."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from importlib.machinery import SourceFileLoader
from typing import NamedTuple

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

    No byte code is written in the caller's folders. Python reads what is there: a rank sees what the caller would import.
    """

    def __init__(self) -> None:
        sys.dont_write_bytecode = True
        self._known = set(sys.modules)  # the modules that have been looked at
        self._own: dict[
            str, tuple[str, tuple[int, int]]
        ] = {}  # name -> file, and (mtime, size) when imported
        # the last caller's import path and working directory
        self._place: tuple[list[str], str] | None = None

    def remember(self) -> None:
        for name in sys.modules.keys() - self._known:
            spec = getattr(sys.modules[name], "__spec__", None)
            if spec and type(spec.loader) is SourceFileLoader and is_own(spec.loader.path):
                self._own[name] = spec.loader.path, _stamp(spec.loader.path)
        self._known = set(sys.modules)

    def forget_stale(self, caller: CallerEnvironment) -> None:
        """Remove all these modules if one was edited or may now come from another file: they may import each other."""
        place = (caller.path, caller.directory)
        edited = any(_stamp(file) != stamp for file, stamp in self._own.values())
        if edited or place != self._place:
            for name in self._own:
                sys.modules.pop(name, None)
            importlib.invalidate_caches()
            self._known -= self._own.keys()
            self._own.clear()
        self._place = place


def is_own(file: str) -> bool:
    """Return whether a file is the caller's own: not Python's, not installed, not minipar's."""
    return not (any(p in file for p in _INSTALLED) or os.path.abspath(file).startswith(_LIBRARIES))


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
        return status.st_mtime_ns, status.st_size
    except OSError:
        return 0, 0
