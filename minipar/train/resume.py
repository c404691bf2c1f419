"""Resuming from a checkpoint: another run's is refused before anything is written; changed settings are reported."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import fields
from importlib.metadata import version
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile

from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.comm.objects import all_gather_objects
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.train_config import TrainConfig
from minipar.train.checkpoint.restore import Checkpoint, CheckpointRef, checkpoints, find_damage
from minipar.train.data.text import TextId
from minipar.train.data.tokenizer import TOKENIZER
from minipar.train.log import METRICS
from minipar.train.state import changed_settings, require_same_run

INPUTS = ("text", "tokens", "tokenizer")
# The files that a run writes beside its checkpoints, `minipar train`'s figures included.
WRITTEN = (
    METRICS, "config.toml", TOKENIZER, "sample.txt", "trace.json", "loss.png", "timeline.png", "tensorboard"
)  # fmt: skip


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
    """Raise ValueError, on every rank, unless all ranks run the same versions with the same settings and text.

    The names of the text's files may differ, their contents may not.
    """
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in INPUTS}
    of_model = {f"model.{name}": value for name, value in vars(settings.pop("model")).items()}
    versions = {f"version of {name}": version(name) for name in ("minipar", "torch")}
    text = {name: f"of checksum {text_id.digest}" for name in INPUTS if getattr(config, name) is not None}
    entries = {
        **versions,
        **of_model,
        **settings,
        **(text or {"text": text_id.digest}),
        "codec": text_id.codec,
    }
    require_equal(world, "settings", entries, "start every rank by the same command, with the same files")


def require_shared(world: Comm, folder: Path) -> None:
    """Raise ValueError, on every rank, unless all ranks see what rank 0 writes to the folder."""
    with ExitStack() as stack:
        own = None if world.rank else stack.enter_context(NamedTemporaryFile(dir=folder, prefix=".shared-"))
        name = all_gather_objects(world, own and Path(own.name).name)[0]
        seen = all_gather_objects(world, (folder / name).exists())
    if not all(seen):
        raise ValueError(
            f"out={folder}: rank {seen.index(False)} does not see what rank 0 writes there; use a folder that all share"
        )


def set_aside(folder: Path) -> None:
    """Move an earlier run's files, if the folder has any, to a subfolder, and say so; this run would overwrite them."""
    if not (folder / METRICS).exists():
        return
    to = next(to for n in count(1) if not (to := folder / f"earlier-{n}").exists())
    to.mkdir()
    for name in WRITTEN:
        if (folder / name).exists():
            (folder / name).rename(to / name)
    print(f"{folder} had the files of an earlier run, which are now in {to}", file=sys.stderr)


def in_own_folder(config: TrainConfig) -> bool:
    return config.resume is not None and config.resume.resolve() == config.folder.resolve()
