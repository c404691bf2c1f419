"""Removing old checkpoints: only whole ones count as kept."""

from __future__ import annotations

import shutil
from pathlib import Path

from minipar.train.restore import checkpoints, find_damage


class OldCheckpoints:
    """The checkpoints of a folder to remove: all but the `keep` newest whole ones, the newest and the resumed one.

    Whether one is whole is found out once, by reading it, and again where its files' sizes or times have changed.
    """

    def __init__(self, folder: Path, keep: int, resumed: Path | None):
        self._folder, self._keep = folder, keep
        self._resumed = None if resumed is None else Path(resumed).resolve()
        self._seen: dict[Path, tuple[list, bool]] = {}

    def remove_all_but(self, written: Path) -> None:
        self._seen[written] = _files_of(written), True
        kept = 0
        for path in checkpoints(self._folder) if self._keep else []:
            if kept >= self._keep and path != written and path.resolve() != self._resumed:
                shutil.rmtree(path, ignore_errors=True)
            elif self._is_whole(path):
                kept += 1

    def _is_whole(self, path: Path) -> bool:
        files = _files_of(path)
        if self._seen.get(path, (None,))[0] != files:
            self._seen[path] = files, find_damage(path, threads=1) is None
        return self._seen[path][1]


def _files_of(path: Path) -> list[tuple]:
    return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir())
