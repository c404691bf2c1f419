"""The `minipar` command. Slow imports are made inside the command that needs them, so that `--help` is fast."""

# longer than 250 lines because every command's flags and help are declared side by side
# No `from __future__ import annotations`: tyro evaluates the annotations, and some name local variables.

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from minipar.errors import RankError
from minipar.exercises.command import exercise_command
from minipar.flags import config_of, flags_of, parse_command, settings_of
from minipar.museum.command import museum_command
from minipar.quiz.command import quiz_command
from minipar.report import Progress, draw_exercise, draw_losses, print_summary
from minipar.schedules.registry import ScheduleName
from minipar.train.check_paths import (
    CHECKPOINTS,
    check_export,
    check_generate,
    check_paths,
    require_readable,
    require_writable,
)
from minipar.train.legal_configs import configs_to_verify
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
        sys.stdout.flush()
    except ValueError as error:
        _exit_with(f"minipar: {error}", 2)
    except RankError as error:
        _exit_with(f"minipar: {error}", 1)
    except KeyboardInterrupt:
        _exit_with("minipar: interrupted", 130)
    except BrokenPipeError:  # whoever read, `head` say, has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush complains
        raise SystemExit(141) from None


def _exit_with(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _commands(settings: dict) -> dict:
    return {
        "train": _train_command(settings),
        "verify": _verify_command(settings),
        "tokenize": tokenize_command,
        "generate": generate_command,
        "export": export_command,
        "timeline": timeline_command,
        "bench": bench_command,
        "plan": plan_command,
        "explore": explore_command,
        "exercise": exercise_command(draw_exercise),
        "museum": museum_command(draw_losses),
        "quiz": quiz_command,
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
    check_paths(config)
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
    check_paths(config, writes=False)
    from minipar.train.verification import table, verify

    result = verify(config)
    print(table(result))
    raise SystemExit(0 if result.equal else 1)


def _sweep(flags, world_size: int) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config)
    configs = configs_to_verify(config, world_size)
    from tqdm import tqdm

    from minipar.train.atomic_files import prepare_folder, write_whole
    from minipar.train.verification import table, verify
    from visualize.verify import draw_sweep, sweep_markdown

    folder = config.out or Path("runs/verify")
    prepare_folder(folder)
    results = [verify(one) for one in tqdm(configs, unit="mesh")]
    draw_sweep(results, folder / "sweep.png")
    write_whole(folder / "sweep.md", sweep_markdown(results))
    wrong = [result for result in results if not result.equal]
    print(*(table(result) for result in wrong), sep="\n\n")
    print(f"{len(results) - len(wrong)} of {len(results)} equal one process; look in {folder}/")
    raise SystemExit(1 if wrong else 0)


def tokenize_command(text: tyro.conf.Positional[Path], tokenizer: Path, out: Path):
    """Write the token ids of a text to a file for `minipar train --tokens`. Never has all of the text in memory.

    Args:
        text: a file of UTF-8.
        tokenizer: a tokenizer.json of the package tokenizers.
        out: the file to write: ids of 16 bits, or 32 where the vocabulary exceeds 65536, and nothing else.
    """
    return partial(_tokenize, text, tokenizer, out)


def _tokenize(text: Path, tokenizer: Path, out: Path) -> None:
    require_readable("text", text)
    require_readable("tokenizer", tokenizer)
    require_writable(out.parent)
    from minipar.train.atomic_files import prepare_folder
    from minipar.train.tokenizer import Tokenizer, write_tokens

    codec = Tokenizer(tokenizer)
    prepare_folder(out.parent)
    count = write_tokens(text, codec, out)
    print(f"{count} tokens of a vocabulary of {codec.vocab_size}: minipar train --tokens {out} "
          f"--tokenizer {tokenizer} --model.vocab-size {codec.vocab_size}")  # fmt: skip


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
        tokens: number of tokens to generate: bytes, unless the run has a tokenizer.
        temperature: 0 takes the most likely token each time; above 0, tokens are sampled.
        seed: seed of the sampling.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
    """
    return partial(_generate, run, prompt, tokens, temperature, tp=tp, pp=pp, seed=seed)


def _generate(run: Path, prompt: str, tokens: int, temperature: float, **options) -> None:
    check_generate(run, tokens, temperature, options["tp"], options["pp"])
    from minipar.train import generate_text

    text = generate_text(run, prompt, tokens, temperature, **options)
    print(text)


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
    check_export(run, out, layout)
    from minipar.train.atomic_files import prepare_folder
    from minipar.train.export import export_llama, export_model
    from minipar.train.restore import Checkpoint, newest_whole

    path = newest_whole(run / CHECKPOINTS)
    if path is None:
        raise ValueError(f"run={run} has no whole checkpoint; train with --checkpoint-every first")
    prepare_folder(out if layout == "llama" else out.parent)
    (export_llama if layout == "llama" else export_model)(Checkpoint(path), out)
    print(f"{path} -> {out}")


def timeline_command(
    schedule: tuple[Literal[ScheduleName, "optimal"], ...] = ("1f1b",),
    stages: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
    slices: int = 1,
    measure: bool = False,
    draw: bool = True,
    out: Path = Path("runs/timeline"),
):
    """Print pipeline schedules as grids, and draw them on a common time axis as PNG and SVG.

    Args:
        schedule: one or more schedules; optimal is the best there is, by exact search (small sizes; needs OR-tools).
        stages: pipeline ranks; a schedule with several chunks per rank divides each rank's stage evenly among them.
        microbatches: microbatches per step.
        chunks: chunks per rank, for breadth-first, interleaved and hanayo (2 if not given).
        costs: seconds of F (forward), I (input gradient) and W (weight gradient) of a rank's stage per microbatch.
        comm: seconds of latency of a message between ranks.
        memory_limit: live activations that zb-auto and optimal may hold per rank (twice the stages if not given).
        slices: of every sample's tokens, for terapipe and seq1f1b; each takes its part of a microbatch's costs.
        measure: also run each schedule, on local ranks that sleep for each action's cost, and draw the measured times.
        draw: draw the pictures; otherwise only print the grids.
        out: the picture file; a name without .png, .svg or .pdf gives a PNG and an SVG.
    """
    options = dict(chunks=chunks, costs=costs, comm=comm, memory_limit=memory_limit, slices=slices)
    return partial(_timeline, schedule, stages, microbatches, measure, out if draw else None, options)


def _timeline(
    schedule, stages: int, microbatches: int, measure: bool, out: Path | None, options: dict
) -> None:
    if out is not None:
        require_writable(out.parent)
    from visualize.pipeline_command import timeline

    timeline(schedule, stages, microbatches, measure=measure, out=out, **options)


def plan_command(
    model: str = "llama-70b",
    gpus: int = 64,
    machine: str = "a100-80gb",
    seq: int = 4096,
    batch: int = 1024,
    precision: str = "mixed",
    explain: str | None = None,
    top: int = 10,
    json: bool = False,
    run: bool = False,
    compress: str = "none",
    auto_split: bool = False,
    calibrate: Path | None = None,
    picture: Path | None = None,
    scaling: Path | None = None,
):
    """Predict memory and time of training on GPUs you may not have: every legal layout, those that fit, the fastest first.

    Planned are dp, pp with its schedules, sequence slices, cp, ep, tp, zero, microbatches and recomputation, with AdamW's
    states. Not planned: tp-layout 2d, 2.5d and 3d, the optimizers muon and lamb, ep-once-per-node and other ways of sending
    tokens to experts, offloading, compile, and the schedules chimera, dualpipe, hanayo, v-half and v-min.

    Args:
        model: a name (llama-7b, llama3-405b, gpt3-175b, mixtral-8x7b ...), or a .toml file with the sizes of a model.
        gpus: number of GPUs.
        machine: a name (a100-80gb, h100, h200, b200, v100 ...), or a .toml file that describes a GPU and its node; local is
            this machine, by local.toml or, where there is none, measured now.
        seq: tokens per sample.
        batch: samples per step, over all GPUs.
        precision: mixed (2 + 2 + 12 bytes per parameter), mixed-fp32-grads (2 + 4 + 12), float32 or float64.
        explain: itemise one layout instead of searching: dp4-pp2-tp8-zero1-mb1-1f1b-full; after a schedule, its chunks or
            slices: interleaved:4, seq1f1b:8. Some are priced here and never searched: terapipe, all_gather.
        top: number of layouts to print.
        json: print the numbers as JSON, in seconds and bytes.
        run: also print the commands that train the winner.
        compress: auto says whether compressed gradients would pay on the winner, and what each method costs; or a method's
            name, as of minipar train --compress.
        auto_split: instead, choose the layers and GPUs of each pipeline stage and its own layout, as Alpa does.
        calibrate: instead, measure this machine, and write it to this .toml file, for --machine.
        picture: a .png, .svg or .pdf to draw memory against the card, and time against memory, to.
        scaling: a .png, .svg or .pdf to draw the winner's weak and strong scaling to 16,384 GPUs to.
    """
    if calibrate is not None:
        return partial(_calibrate, calibrate)
    options = dict(precision=precision, explain=explain, as_json=json, run=run, top=top, compress=compress)
    options["auto_split"] = auto_split
    return partial(_plan, (picture, scaling), model, gpus, machine, seq, batch, options)


def _plan(
    pictures: tuple[Path | None, Path | None], model: str, gpus: int, machine: str, seq: int, batch: int, options: dict
) -> None:  # fmt: skip
    from minipar.cost.plan_command import plan_command

    for picture in filter(None, pictures):
        from visualize.cost import check_picture

        check_picture(picture)
        require_writable(picture.parent)
    if machine == "local":
        if not Path("local.toml").exists():
            _calibrate(Path("local.toml"))
        machine = "local.toml"
    outcome = plan_command(model, gpus, machine, seq, batch, **options)
    print(outcome.text)
    if any(pictures):
        from visualize.cost import draw_layout_scaling, draw_plan

        memory, scaling = pictures
        if memory is not None:
            print(f"wrote {draw_plan(outcome.job, outcome.layouts, memory, outcome.plan)}", file=sys.stderr)
        if scaling is not None:
            print(f"wrote {draw_layout_scaling(outcome.job, outcome.layouts[0], scaling)}", file=sys.stderr)


def _calibrate(path: Path) -> None:
    if path.suffix != ".toml":
        raise ValueError(f"calibrate={path} is no machine file; use a name that ends in .toml")
    require_writable(path.parent)
    from minipar.train.calibrate import calibrate

    calibrate(path, on_progress=partial(print, file=sys.stderr))
    print(f"wrote {path}: minipar plan --machine {path}", file=sys.stderr)


def explore_command(site: Path | None = None, port: int = 0, browser: bool = True):
    """Open the site in a browser, on this machine alone: pipelines, the planner, collectives and the mesh, to play with.

    Args:
        site: the folder of a built site (build/site of this checkout if not given); `make site` builds it.
        port: of the server on 127.0.0.1; 0 takes any free one.
        browser: open a browser; otherwise only print the address.
    """
    return partial(_explore, site, port, browser)


def _explore(site: Path | None, port: int, browser: bool) -> None:
    from visualize.explore import explore

    explore(site, port, browser)


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
