"""Removing old checkpoints: only undamaged checkpoints count towards the number to keep."""

from __future__ import annotations

import shutil
from pathlib import Path

from minipar.train.checkpoint.restore import checkpoints, find_damage

Files = list[tuple[str, int, int]]  # name, size, time of the last change


class OldCheckpoints:
    """Removes the checkpoints of a folder, except the `keep` newest undamaged ones, the newest and the resumed one.

    Each checkpoint is checked once, by reading it, and again when its files' sizes or times have changed.
    """

    def __init__(self, folder: Path, keep: int, resumed: Path | None):
        self._folder, self.keep = folder, keep
        self._resumed = None if resumed is None else Path(resumed).resolve()
        self._seen: dict[Path, tuple[Files, bool]] = {}

    def remove_all_but(self, written: Path) -> None:
        self._seen[written] = _files_of(written), True
        kept = 0
        for path in checkpoints(self._folder) if self.keep else []:
            if kept >= self.keep and path != written and path.resolve() != self._resumed:
                shutil.rmtree(path, ignore_errors=True)
            elif self._is_whole(path):
                kept += 1

    def _is_whole(self, path: Path) -> bool:
        try:
            files = _files_of(path)
        except OSError:  # as for a file that has the name of a checkpoint
            return False
        if path not in self._seen or self._seen[path][0] != files:
            self._seen[path] = files, find_damage(path, threads=1) is None
        return self._seen[path][1]


def _files_of(path: Path) -> Files:
    return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir())
