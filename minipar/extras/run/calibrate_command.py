"""The command `minipar calibrate`. Imports torch only to measure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tyro

from minipar.config.check_paths import require_writable


def calibrate_command(file: tyro.conf.Positional[Path], ranks: int | None = None) -> Callable[[], None]:
    """Measure this machine, and write it to a file for `minipar plan --machine`.

    Args:
        file: the machine file to write, ending in .toml; --machine local reads local.toml.
        ranks: number of processes that measure at once; one per core, at least 2, if not given.
    """
    return partial(_calibrate, file, ranks)


def _calibrate(file: Path, ranks: int | None) -> None:
    if file.suffix != ".toml":
        raise ValueError(f"file={file} is no machine file; use a name that ends in .toml")
    if ranks is not None and ranks < 2:
        raise ValueError(f"ranks={ranks} send no messages to measure; use 2 or more")
    require_writable(file.parent)
    from minipar.extras.run.calibrate import calibrate

    calibrate(file, ranks, on_progress=partial(print, file=sys.stderr))
    print(f"wrote {file}: minipar plan --machine {file}", file=sys.stderr)
