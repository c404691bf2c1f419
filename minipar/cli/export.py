"""`minipar export`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from minipar.cli.parse import Work
from minipar.config.check_paths import CHECKPOINTS, check_export


def export_command(
    run: tyro.conf.Positional[Path], out: Path, layout: Literal["minipar", "llama"] = "minipar"
) -> Work:
    """Export the newest complete checkpoint of a run as safetensors, with every weight unsharded.

    Args:
        run: the folder of a run that was trained with --checkpoint-every.
        out: the file to write (layout minipar), or the folder (layout llama).
        layout: whose names weights get: minipar's, or Hugging Face's for a Llama or Qwen, with config.json and tokenizer.
    """
    return partial(_export, run, out, layout)


def _export(run: Path, out: Path, layout: str) -> None:
    check_export(run, out, layout)
    from minipar.support.atomic_files import prepare_folder
    from minipar.train.checkpoint.export import export_llama, export_model
    from minipar.train.checkpoint.restore import Checkpoint, newest_whole

    path = newest_whole(run / CHECKPOINTS)
    if path is None:
        raise ValueError(f"run={run} has no whole checkpoint; train with --checkpoint-every first")
    prepare_folder(out if layout == "llama" else out.parent)
    checkpoint = Checkpoint(path)
    (export_llama if layout == "llama" else export_model)(checkpoint, out)
    print(f"{path} -> {out}")
    if layout == "llama" and checkpoint.extra.get("codec") == "ids":
        print("without a tokenizer: the run was trained on bare token ids")
