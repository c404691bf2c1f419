"""The command `minipar train --dry-run`."""

from minipar.config.train_config import TrainConfig
from minipar.extras.dry_run.choices import DryRunOptions
from minipar.extras.dry_run.report import report
from minipar.extras.dry_run.run import dry_run


def dry_run_command(config: TrainConfig, options: DryRunOptions) -> int:
    """Print a dry run of this configuration; return 1 if it would fail or not fit in memory, else 0."""
    result = dry_run(config, options.memory, options.by_kind or None)
    print(report(result))
    return 0 if result.works else 1
