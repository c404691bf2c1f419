"""Checks of the files and folders that a command reads and writes, before it writes any. Imports no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from minipar.config.choices import CHOSEN
from minipar.support.errors import require_positive

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig

CHECKPOINTS = "checkpoints"  # in the run's folder


def check_paths(config: TrainConfig, writes: bool = True) -> None:
    """Raise ValueError unless a TrainConfig's input files, its checkpoint and, if `writes`, its folder can be used."""
    for name in ("text", "tokens", "tokenizer"):
        if getattr(config, name) is not None:
            require_readable(name, getattr(config, name))
    for name in CHOSEN:
        config.choice(name).check_paths(config)
    if config.resume is not None and config.resume.resolve() != config.folder.resolve():
        require_checkpoint("resume", config.resume)
    if writes:
        require_writable(config.folder)


def check_generate(run: Path, tokens: int, temperature: float, tp: int, pp: int, seed: int = 0) -> None:
    """Raise ValueError if `minipar generate` has no checkpoint to load, or its arguments are out of range."""
    require_checkpoint("run", run)
    require_positive(tp=tp, pp=pp)
    if tokens < 0 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"tokens={tokens} and temperature={temperature} are out of range; use finite numbers, 0 or more"
        )
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} is out of range; use 0 to 2**63 - 1")


def check_export(run: Path, out: Path, layout: str) -> None:
    """Raise ValueError if `minipar export` has no checkpoint to load, or cannot write to `out`."""
    require_checkpoint("run", run)
    if layout == "minipar" and out.is_dir():
        raise ValueError(f"out={out} is a folder; use the name of a file, or --layout llama")
    require_writable(out if layout == "llama" else out.parent)


def require_readable(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{name}={path}: {error.strerror}; give a readable file") from None


def require_picture(name: str, path: Path) -> None:
    """Raise ValueError unless the file name ends in .png, .svg or .pdf and its folder can be written to."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{name}={path}: its name says no format; use a .png, .svg or .pdf")
    require_writable(path.parent)


def require_checkpoint(name: str, run: Path) -> None:
    """Raise ValueError if the run's folder has no checkpoint. A damaged checkpoint counts as one."""
    if not any((run / CHECKPOINTS).glob("step-*")):
        raise ValueError(f"{name}={run} has no whole checkpoint; train with --checkpoint-every first")


def require_writable(folder: Path) -> None:
    """Raise ValueError unless the folder can be written to or, if it does not exist, can be made. Makes nothing."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    reason = None
    if not there.is_dir():
        reason = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"{there} is write-protected"
    if reason:
        raise ValueError(f"out={folder} cannot be written to: {reason}; use another folder")
