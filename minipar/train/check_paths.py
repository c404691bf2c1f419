"""Checks of what a command reads and writes, without torch and before anything is written."""

from __future__ import annotations

import math
import os
from pathlib import Path

from minipar.errors import require_positive

CHECKPOINTS = "checkpoints"  # in the run's folder


def check_paths(config, writes: bool = True) -> None:
    """Raise ValueError where a TrainConfig's text, checkpoints or (if the command `writes`) folder cannot be used."""
    for name in ("text", "tokens", "tokenizer"):
        if getattr(config, name) is not None:
            require_readable(name, getattr(config, name))
    if (folder := config.offload_folder) is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"offload_folder={folder} is no folder to write to; use one that is there")
    if config.resume is not None and config.resume.resolve() != config.folder.resolve():
        require_checkpoint("resume", config.resume)
    if writes:
        require_writable(config.folder)


def check_elastic(config) -> None:
    """Raise ValueError where an elastic run would have nothing to go on from, or losses that depend on the mesh."""
    if not config.elastic:
        return
    if not config.checkpoint_every:
        raise ValueError("elastic=True goes on from checkpoints, and checkpoint_every=0; use 1 or more")
    if config.compress != "none":
        raise ValueError(
            f"elastic=True may go on with another mesh, and the losses of compress={config.compress} depend on it; "
            "use compress=none"
        )


def check_generate(run: Path, tokens: int, temperature: float, tp: int, pp: int) -> None:
    """Raise ValueError where `minipar generate` has nothing to load, or cannot generate so."""
    require_checkpoint("run", run)
    require_positive(tp=tp, pp=pp)
    if tokens < 0 or not 0 <= temperature < math.inf:
        raise ValueError(
            f"tokens={tokens} and temperature={temperature} are out of range; use finite numbers, 0 or more"
        )


def check_export(run: Path, out: Path, layout: str) -> None:
    """Raise ValueError where `minipar export` has nothing to load, or cannot write to `out`."""
    require_checkpoint("run", run)
    if layout == "minipar" and out.is_dir():
        raise ValueError(f"out={out} is a folder; use the name of a file, or --layout llama")
    require_writable(out if layout == "llama" else out.parent)


def require_readable(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{name}={path}: {error.strerror}; give a readable file") from None


def require_checkpoint(name: str, run: Path) -> None:
    """Raise ValueError where the run's folder has no checkpoint, damaged or not."""
    if not any((run / CHECKPOINTS).glob("step-*")):
        raise ValueError(f"{name}={run} has no whole checkpoint; train with --checkpoint-every first")


def require_writable(folder: Path) -> None:
    """Raise ValueError where this folder does not exist and cannot be made, or cannot be written to. Makes nothing."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    reason = None
    if not there.is_dir():
        reason = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = f"{there} is write-protected"
    if reason:
        raise ValueError(f"out={folder} cannot be written to: {reason}; use another folder")
