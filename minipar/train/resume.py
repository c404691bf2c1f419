"""Going on from a checkpoint: what is refused before anything is written, and what is said to differ."""

from __future__ import annotations

import sys
from pathlib import Path

from minipar.comm.objects import all_gather_objects
from minipar.train.check_paths import CHECKPOINTS
from minipar.train.restore import Checkpoint, Chosen, checkpoints, find_damage
from minipar.train.state import changed_settings, require_same_run
from minipar.train.text import TextId
from minipar.train.train_config import TrainConfig


def require_no_others(config: TrainConfig) -> None:
    """Refuse a folder with another run's checkpoints: only the highest step numbers are kept, of whichever run."""
    if config.checkpoint_every and not _in_own_folder(config) and checkpoints(config.folder / CHECKPOINTS):
        raise ValueError(
            f"{config.folder} has checkpoints of an earlier run; go on with that by --resume {config.folder}, "
            "or use another --out or --name"
        )


def require_usable(config: TrainConfig, text_id: TextId, path: Path | None) -> Chosen | None:
    """Return the checkpoint at `path`, the newest whole one of `config.resume`, or None to begin at step 0.

    A run may begin in its own folder as long as that has no checkpoint. Where it has some and none is whole, beginning
    again would overwrite what may only be unreadable for now.
    Raises ValueError for that, for a folder without checkpoints, for a checkpoint of another run, and where the folder to
    write to has checkpoints of another run.
    """
    if path is None:
        found = checkpoints(config.resume / CHECKPOINTS)
        if found:
            raise ValueError(
                f"resume={config.resume}: none of its {len(found)} checkpoints can be read (the newest: "
                f"{find_damage(found[0])}); nothing was changed. Try again once the disk can be read, or remove "
                f"{config.resume / CHECKPOINTS} to begin at step 0"
            )
        if not _in_own_folder(config):
            raise ValueError(
                f"resume={config.resume} has no whole checkpoint; train with --checkpoint-every first"
            )
        return None
    checkpoint = Checkpoint(path)
    require_same_run(config, checkpoint, text_id)
    require_no_others(config)
    changes = changed_settings(config, checkpoint)
    print(f"going on from {path}" + (f" with {changes}" if changes else ""), file=sys.stderr)
    return checkpoint.chosen


def require_same_text(world, config: TrainConfig, text_id: TextId) -> None:
    """Raise ValueError, on every rank, where the ranks have read different texts."""
    other = [r for r, other_id in enumerate(all_gather_objects(world, text_id)) if other_id != text_id]
    if other:
        name = "text" if config.tokens is None else "tokens"
        raise ValueError(
            f"{name}={getattr(config, name)} has other bytes on rank {other[0]} than on rank {world.rank}"
        )


def _in_own_folder(config: TrainConfig) -> bool:
    return config.resume is not None and config.resume.resolve() == config.folder.resolve()
