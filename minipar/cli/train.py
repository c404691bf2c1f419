"""`minipar train`."""

# No `from __future__ import annotations`: tyro evaluates the annotations, and some name local variables, which no type
# checker can follow.

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro

from minipar.cli.flags import config_of
from minipar.cli.parse import Parsed, Work
from minipar.cli.report import Progress, print_summary
from minipar.cli.topics import asked_topic, run_flags
from minipar.config.check_paths import check_paths
from minipar.config.choices import CHOSEN
from minipar.config.train_config import TrainConfig


@dataclass(frozen=True)
class DryRunFlags:
    """Flags of `minipar train` that are no settings of a run."""

    dry_run: bool = False
    """start no rank; say what each would hold and send, and whether any would wait for ever; above 64 ranks, by kind"""
    by_kind: bool = False
    """with --dry-run, run only the first and the last rank of each kind; the ranks between are taken to be like them"""
    memory: float | None = None
    """with --dry-run, a device's memory in GB; exits 1 if a rank would need more"""


def train_flags(argv: Sequence[str] | None) -> Parsed:
    """Return the command, whose flags depend on what `argv` chooses."""
    settings, words, below_help = run_flags(argv, TrainConfig(), "train")
    unprefixed: Any = tyro.conf.OmitArgPrefixes
    hidden: Any = tyro.conf.Suppress
    ahead_type = unprefixed[DryRunFlags]
    if argv is not None and asked_topic(argv) not in (None, "", "all", "run"):
        ahead_type = hidden[ahead_type]  # a topic shows its own flags alone

    def train_command(
        flags: Annotated[type(settings), tyro.conf.arg(name="")] = settings,  # type: ignore[valid-type]
        ahead: Annotated[ahead_type, tyro.conf.arg(name="dry run")] = DryRunFlags(),  # type: ignore[valid-type]
    ) -> Work:
        """Train a byte-level model on text, on local ranks or under torchrun, and compare its first steps with one process.

        Args:
            flags: the settings of the run.
            ahead: What would happen, before any device is rented.
        """
        return _work(flags, ahead)

    return Parsed(train_command, words, below_help)


def _work(flags: Any, ahead: Any) -> Work:
    if ahead.memory is not None and not ahead.dry_run:
        raise ValueError(
            f"memory={ahead.memory:g} is compared by a dry run; use --dry-run too, or leave it out"
        )
    if ahead.by_kind and not ahead.dry_run:
        raise ValueError("by_kind is said of a dry run; use --dry-run too, or leave it out")
    if not ahead.dry_run:
        return partial(_train, flags)
    return partial(_dry_run, flags, ahead.memory, by_kind=ahead.by_kind or None)


def _train(flags: Any) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config)
    import_chosen(config)
    from minipar.train import train

    with Progress(config) as progress:
        result = train(config, progress)
    if result is not None:
        print_summary(result)


def _dry_run(flags: Any, memory_gb: float | None, by_kind: bool | None) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config, writes=False)
    import_chosen(config)
    from minipar.verification.dry_report import report
    from minipar.verification.dry_run import dry_run

    result = dry_run(config, memory_gb, by_kind)
    print(report(result))
    raise SystemExit(0 if result.works else 1)


def import_chosen(config: TrainConfig) -> None:
    """Import all that a run chooses by name. Raises a one-line ValueError if an extra cannot be imported."""
    for name, kind in CHOSEN.items():
        choice = config.choice(name)
        if getattr(config, name) in kind.own or not choice.implementation:
            continue
        try:
            choice.load()
        except Exception as error:  # an extra's module may raise anything when it is imported
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"{name}={getattr(config, name)!r} is {choice.implementation}, which cannot be imported: {why}"
            ) from error
