"""Resuming from a checkpoint: another run's is refused before anything is written; changed settings are reported."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from minipar.checkpoint.restore import Checkpoint, CheckpointRef, checkpoints, find_damage
from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.train_config import TrainConfig
from minipar.data.text import TextId
from minipar.train.state import changed_settings, require_same_run


def require_no_others(config: TrainConfig) -> None:
    """Raise ValueError if the folder has another run's checkpoints.

    This run would replace the settings and metrics beside them, and delete them if it saves checkpoints of its own.
    """
    folder = config.folder / CHECKPOINTS
    if not in_own_folder(config) and folder.exists() and checkpoints(folder):
        raise ValueError(
            f"{config.folder} has checkpoints of an earlier run; go on with that by --resume {config.folder}, "
            "or use another --out or --name"
        )


def require_usable(config: TrainConfig, text_id: TextId, path: Path | None) -> CheckpointRef | None:
    """Return the checkpoint at `path`, the newest complete one of `config.resume`; if there is none, None: begin at step 0.

    A run may begin at step 0 in its own folder only if the folder has no checkpoint, not even a damaged one: a damaged one
    may be readable again later, and would be overwritten.
    Raises ValueError if no checkpoint is complete or there is none, if the checkpoint is another run's, and if the folder
    to write to has checkpoints of another run.
    """
    if path is None:
        assert config.resume is not None
        found = checkpoints(config.resume / CHECKPOINTS)
        if found:
            raise ValueError(
                f"resume={config.resume}: none of its {len(found)} checkpoints can be read (the newest: "
                f"{find_damage(found[0])}); nothing was changed. Try again once the disk can be read, or remove "
                f"{config.resume / CHECKPOINTS} to begin at step 0"
            )
        if not in_own_folder(config):
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


def require_same_start(world: Comm, config: TrainConfig, text_id: TextId) -> None:
    """Raise ValueError, on every rank, if the ranks were started with other settings or have read other texts.

    Paths may differ: what is read from them is compared where it is read.
    """
    settings: dict[str, object] = {"text": text_id}
    for prefix, table in {
        "": config,
        "model.": config.model,
        **{f"{choice}.": own for choice, own in config.options.items()},
    }.items():
        names = [field.name for field in fields(table) if "Path" not in str(field.type)]
        settings |= {
            f"{prefix}{name}": getattr(table, name) for name in names if name not in ("model", "options")
        }
    advice = "start every rank with the same flags and the same files"
    require_equal(world, "settings", settings, advice)


def in_own_folder(config: TrainConfig) -> bool:
    return config.resume is not None and config.resume.resolve() == config.folder.resolve()
