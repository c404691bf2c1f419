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
from minipar.config.mesh_rules import MeshSizes
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.support.environment import is_rank_0


def verify_flags(argv: Sequence[str] | None) -> Parsed:
    """Return the command: for a training of the caller's own if `argv` names one, else with flags that `argv` chooses."""
    if argv and not argv[0].startswith("-"):
        return Parsed(own_training_command, argv)
    settings, words, below_help = run_flags(argv, VERIFY_DEFAULTS, "verify")

    def verify_command(
        flags: Annotated[type(settings), tyro.conf.arg(name="")] = settings,  # type: ignore[valid-type]
        all: bool = False,
        world_size: int = 8,
    ) -> Work:
        """Train on a mesh and in one process from the same seed, and compare every tensor. Exits 1 if any differ.

        For a model and a step of your own, by any library: minipar verify FILE.py:SETUP --help.

        Args:
            flags: the settings of the run; by default a small model in float64.
            all: verify every valid mesh, ZeRO stage and schedule, instead of only the given one.
            world_size: number of ranks of each mesh that --all verifies.
        """
        return partial(_sweep, flags, world_size) if all else partial(_verify, flags)

    return Parsed(verify_command, words, below_help)


def own_training_command(
    setup: tyro.conf.Positional[str],
    sizes: Annotated[MeshSizes, tyro.conf.arg(name="")],
    steps: int = 3,
    backend: str | None = None,
    timeout_s: float = 60.0,
) -> Work:
    """Train by your own code, with any library, on a mesh and in one process; compare losses, gradients and weights.

    `setup(world, mesh)` returns `(model, optimizer, step)`; `world` is None in one process. `step(k)` trains on the k-th
    batch and returns its loss. With `save(folder)` and `load(folder)` behind these, checkpoints are compared, too.
    Works under torchrun: torchrun --nproc-per-node 4 -m minipar verify FILE.py:SETUP --dp 4.
    Exits 0 if every number is one process's, 1 if not, and then says what differs first, and a likely cause.

    Args:
        setup: FILE.py:NAME or PACKAGE.MODULE:NAME of the function `setup`.
        steps: training steps to compare.
        backend: gloo, nccl or auto; by default gloo.
        timeout_s: how long one wait, `setup` or one step may take, in seconds.
    """
    return partial(_own_training, setup, steps=steps, backend=backend, timeout_s=timeout_s, **sizes)


def _own_training(setup: str, **options: Any) -> None:
    from minipar.train.verification.own_training.verify_training import verify_training

    result = verify_training(setup, **options)
    if is_rank_0():
        print(result)
    raise SystemExit(0 if result.equal else 1)


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
