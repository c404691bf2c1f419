"""`minipar verify`."""

# No `from __future__ import annotations`: tyro evaluates the annotations, and some of these refer to local variables,
# which no type checker can follow.

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from minipar.cli.flags import config_of
from minipar.cli.parse import Parsed, Work
from minipar.cli.topics import run_flags
from minipar.cli.train import import_chosen
from minipar.config.check_paths import check_paths
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig


def verify_flags(argv: Sequence[str] | None) -> Parsed:
    """Return the command, whose flags depend on what `argv` chooses."""
    settings, words, below_help = run_flags(argv, VERIFY_DEFAULTS, "verify")

    def verify_command(
        flags: Annotated[type(settings), tyro.conf.arg(name="")] = settings,  # type: ignore[valid-type]
        all: bool = False,
        world_size: int = 8,
    ) -> Work:
        """Train on a mesh and in one process from the same seed, and compare every tensor. Exits 1 if any differ.

        Args:
            flags: the settings of the run; by default a small model in float64.
            all: verify every valid mesh, ZeRO stage and schedule, instead of only the given one.
            world_size: number of ranks of each mesh that --all verifies.
        """
        return partial(_sweep, flags, world_size) if all else partial(_verify, flags)

    return Parsed(verify_command, words, below_help)


def _verify(flags: Any) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config, writes=False)
    import_chosen(config)
    from minipar.train.verification.verify import table, verify

    result = verify(config)
    print(table(result))
    raise SystemExit(0 if result.equal else 1)


def _sweep(flags: Any, world_size: int) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config)
    from minipar.train.verification.legal_configs import configs_to_verify

    configs = configs_to_verify(config, world_size)
    from tqdm import tqdm

    from minipar.support.atomic_files import prepare_folder, write_whole
    from minipar.train.verification.verify import table, verify
    from minipar.visualize.verify import draw_sweep, sweep_markdown

    folder = config.out or Path("runs/verify")
    prepare_folder(folder)
    results = [verify(one) for one in tqdm(configs, unit="mesh", disable=None)]
    draw_sweep(results, folder / "sweep.png")
    write_whole(folder / "sweep.md", sweep_markdown(results))
    wrong = [result for result in results if not result.equal]
    print(*(table(result) for result in wrong), sep="\n\n")
    print(f"{len(results) - len(wrong)} of {len(results)} equal one process; look in {folder}/")
    raise SystemExit(1 if wrong else 0)
