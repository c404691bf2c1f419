"""`minipar train --dry-run` and its options. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from minipar.support.options import option
from minipar.support.registry import Choice


@dataclass(frozen=True)
class DryRunOptions:
    """The options of a dry run."""

    by_kind: bool = option(
        False,
        "with --dry-run, run only the first rank of each kind; the others are taken to be like it",
    )
    memory: float | None = option(
        None, "with --dry-run, a device's memory in GB; exits 1 if a rank would need more"
    )


DRY_RUN = Choice(
    "minipar.extras.dry_run.command:dry_run_command",
    "start no rank; say what each would hold and send, and whether each message has its receive; above 64 ranks, by kind",
    DryRunOptions,
)
