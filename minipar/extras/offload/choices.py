"""The choices "cpu" and "disk" of `--offload`. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipar.support.options import option
from minipar.support.registry import Choice


@dataclass(frozen=True)
class DiskOptions:
    """The options of "disk", which keeps master weights and optimizer states in a file."""

    folder: Path | None = option(
        None, "a folder for that file; none: the system's folder for temporary files"
    )


class Offload(Choice):
    """A choice of `--offload`: where master weights and optimizer states are stored outside the device's memory."""

    unpriced = ""

    def check(self, config: Any) -> None:
        if not config.zero:
            raise ValueError(
                f"offload={config.offload} is for the states that zero cuts, and zero=0; use zero=1, 2 or 3, on "
                "one rank too"
            )

    def check_paths(self, config: Any) -> None:
        folder = getattr(config.options.get("offload"), "folder", None)
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"offload.folder={folder} is no folder to write to; use one that is there")


CPU = Offload("minipar.extras.offload.places:ON_HOST", "in CPU memory")
DISK = Offload("minipar.extras.offload.places:ON_DISK", "in a file", DiskOptions)
