"""The `minipar` command. Slow imports are made inside the command that needs them, so that `--help` is fast."""

# No `from __future__ import annotations`: tyro evaluates the annotations, and some name local variables.

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from minipar.errors import RankError
from minipar.flags import config_of, flags_of, parse_command, settings_of
from minipar.report import Progress, print_summary
from minipar.schedules.registry import ScheduleName
from minipar.train.train_config import VERIFY_DEFAULTS, TrainConfig

DESCRIPTION = (
    "Distributed training, every piece written by hand and proved equal to one process. "
    "Each command explains its flags: minipar train --help. "
    "Completion of commands, flags and choices: minipar --tyro-print-completion bash (or zsh)."
)


def main(argv: list[str] | None = None) -> None:
    """Run the command. Exits 0 when done, 1 if a rank failed, 2 with a one-line message on a bad request, 130 on Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        parse_command(argv, _commands(settings_of(argv)), DESCRIPTION)()
    except ValueError as error:
        _exit_with(f"minipar: {error}", 2)
    except RankError as error:
        _exit_with(f"minipar: {error}", 1)
    except KeyboardInterrupt:
        _exit_with("minipar: interrupted", 130)


def _exit_with(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _commands(settings: dict) -> dict:
    return {
        "train": _train_command(settings),
        "verify": _verify_command(settings),
        "generate": generate_command,
        "export": export_command,
        "timeline": timeline_command,
        "bench": bench_command,
    }


# tyro calls a command with the parsed arguments, and the command returns a callable that does the work. Bad requests are
# then found outside tyro, which would print them in a box.


def _train_command(settings: dict):
    flags = flags_of(TrainConfig(), settings)

    def train_command(
        flags: Annotated[type(flags), tyro.conf.arg(name="")] = flags,
        config: Path | None = None,
    ):
        """Train a byte-level model on text, on local ranks or under torchrun, and compare its first steps with one process.

        Args:
            flags: the settings of the run.
            config: a TOML file with these settings; flags override it. Every run writes its own, as config.toml.
        """
        return partial(_train, flags)

    return train_command


def _train(flags) -> None:
    config = config_of(flags, TrainConfig)
    from minipar.train import train

    with Progress(config) as progress:
        result = train(config, progress)
    if result is not None:
        print_summary(result)


def _verify_command(settings: dict):
    flags = flags_of(VERIFY_DEFAULTS, settings)

    def verify_command(
        flags: Annotated[type(flags), tyro.conf.arg(name="")] = flags,
        all: bool = False,
        world_size: int = 8,
        config: Path | None = None,
    ):
        """Train on a mesh and in one process from the same seed, and compare every tensor. Exits 1 if any differ.

        Args:
            flags: the settings of the run; by default a small model in float64.
            all: verify every valid mesh, ZeRO stage and schedule instead of the one given.
            world_size: number of ranks of each mesh that --all verifies.
            config: a TOML file with these settings; flags override it.
        """
        return partial(_sweep, flags, world_size) if all else partial(_verify, flags)

    return verify_command


def _verify(flags) -> None:
    config = config_of(flags, TrainConfig)
    from minipar.train.verification import table, verify

    result = verify(config)
    print(table(result))
    raise SystemExit(0 if result.equal else 1)


def _sweep(flags, world_size: int) -> None:
    config = config_of(flags, TrainConfig)
    from tqdm import tqdm

    from minipar.train.atomic_files import prepare_folder, write_whole
    from minipar.train.verification import legal_configs, table, verify
    from visualize.verify import draw_sweep, sweep_markdown

    configs = list(legal_configs(config, world_size))
    if not configs:
        raise ValueError(f"world_size={world_size}: no mesh of so many ranks is legal for this model")
    folder = config.out or Path("runs/verify")
    prepare_folder(folder)
    results = [verify(one) for one in tqdm(configs, unit="mesh")]
    draw_sweep(results, folder / "sweep.png")
    write_whole(folder / "sweep.md", sweep_markdown(results))
    wrong = [result for result in results if not result.equal]
    print(*(table(result) for result in wrong), sep="\n\n")
    print(f"{len(results) - len(wrong)} of {len(results)} equal one process; look in {folder}/")
    raise SystemExit(1 if wrong else 0)


def generate_command(
    run: tyro.conf.Positional[Path],
    prompt: str = "The ",
    tokens: int = 300,
    temperature: float = 0.0,
    seed: int = 0,
    tp: int = 1,
    pp: int = 1,
):
    """Generate text from the newest complete checkpoint of a run, on tp x pp local ranks.

    Args:
        run: the folder of a run that was trained with --checkpoint-every.
        prompt: the text to continue.
        tokens: number of bytes to generate.
        temperature: 0 takes the most likely byte each time; above 0, bytes are sampled.
        seed: seed of the sampling.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
    """
    return partial(_generate, run, prompt, tokens, temperature, tp=tp, pp=pp, seed=seed)


def _generate(run: Path, prompt: str, *args, **kwargs) -> None:
    from minipar.train import generate_text

    print(prompt + generate_text(run, prompt, *args, **kwargs).removeprefix(prompt))


def export_command(
    run: tyro.conf.Positional[Path], out: Path, layout: Literal["minipar", "llama"] = "minipar"
):
    """Export the newest complete checkpoint of a run as safetensors, with every weight unsharded.

    Args:
        run: the folder of a run that was trained with --checkpoint-every.
        out: the file to write (layout minipar), or the folder (layout llama).
        layout: names of the weights: minipar's, or those of Hugging Face's Llama, with a config.json.
    """
    return partial(_export, run, out, layout)


def _export(run: Path, out: Path, layout: str) -> None:
    from minipar.train.atomic_files import prepare_folder
    from minipar.train.export import export_llama, export_model
    from minipar.train.restore import Checkpoint, newest_whole
    from minipar.train.trainer import CHECKPOINTS

    path = newest_whole(run / CHECKPOINTS)
    if path is None:
        raise ValueError(f"run={run} has no whole checkpoint; train with --checkpoint-every first")
    prepare_folder(out if layout == "llama" else out.parent)
    (export_llama if layout == "llama" else export_model)(Checkpoint(path), out)
    print(f"{path} -> {out}")


def timeline_command(
    schedule: tuple[ScheduleName, ...] = ("1f1b",),
    stages: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
    measure: bool = False,
    draw: bool = True,
    out: Path = Path("runs/timeline"),
):
    """Print pipeline schedules as grids, and draw them on a common time axis as PNG and SVG.

    Args:
        schedule: one or more schedules.
        stages: pipeline ranks; a schedule with several chunks per rank divides each rank's stage evenly among them.
        microbatches: microbatches per step.
        chunks: chunks per rank, for breadth-first and interleaved (2 if not given).
        costs: seconds of F (forward), I (input gradient) and W (weight gradient) of a rank's stage per microbatch.
        comm: seconds of latency of a message between ranks.
        memory_limit: live activations that zb-auto may hold per rank (twice the stages if not given).
        measure: also run each schedule, on local ranks that sleep for each action's cost, and draw the measured times.
        draw: draw the pictures; otherwise only print the grids.
        out: the picture file; a name without .png, .svg or .pdf gives a PNG and an SVG.
    """
    options = dict(chunks=chunks, costs=costs, comm=comm, memory_limit=memory_limit)
    return partial(_timeline, schedule, stages, microbatches, measure, out if draw else None, options)


def _timeline(
    schedule, stages: int, microbatches: int, measure: bool, out: Path | None, options: dict
) -> None:
    from visualize.pipeline_command import timeline

    timeline(schedule, stages, microbatches, measure=measure, out=out, **options)


def bench_command(names: tyro.conf.Positional[tuple[str, ...]] = (), quick: bool = False):
    """Time minipar against torch's own implementations in the same run, and print tables of the ratios.

    Args:
        names: the tables to print; all if none are given.
        quick: use fewer repetitions and sizes.
    """
    return partial(_bench, names, quick)


def _bench(names: tuple[str, ...], quick: bool) -> None:
    sys.path.insert(0, str(Path.cwd()))  # not on the path of a console script
    try:
        import benchmarks
    except ImportError:
        raise ValueError("the benchmarks are not installed: run this in a checkout") from None
    benchmarks.run(names or None, quick=quick)
