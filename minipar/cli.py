"""The `minipar` command. What draws imports visualize here, when it draws."""

# No postponed annotations: tyro reads them, and those of `_train_command` are imported inside it.

import sys
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Literal

import tyro

from minipar.errors import RankError
from minipar.flags import checked, settings_of, unchecked
from minipar.report import Progress, present

DESCRIPTION = "Distributed training, every piece written by hand and proved equal to one process."


def main(argv: list[str] | None = None) -> None:
    """Exit 0 when done, 2 with one line for a bad request, 1 where a rank failed, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        settings = settings_of(argv)
        command = tyro.extras.subcommand_cli_from_dict(
            {
                "train": _train_command(settings),
                "verify": _verify_command(settings),
                "generate": _generate_command(),
                "export": _export_command(),
                "timeline": _timeline_command(),
                "bench": _bench_command(),
            },
            prog="minipar",
            description=DESCRIPTION,
            args=argv,
        )
        command()
    except ValueError as error:
        _leave(f"minipar: {error}", 2)
    except RankError as error:
        _leave(f"minipar: {error}", 1)
    except KeyboardInterrupt:
        _leave("minipar: interrupted", 130)


def _leave(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)


# A command is a function that tyro calls with what it parsed and that returns what to do: what is wrong with a request is
# then found outside tyro, which would put it in a box.


def _train_command(settings: dict):
    from minipar.train import TrainConfig, train

    defaults = unchecked(TrainConfig(), settings)

    def train_command(
        config: Annotated[type(defaults), tyro.conf.arg(name="")] = defaults,
        file: Annotated[Path | None, tyro.conf.arg(name="config")] = None,
    ):
        """Train a byte-level model on text, on local ranks or as one of torchrun's, and compare with one process.

        Args:
            config: the run.
            file: a TOML file of these settings; flags win over it. Every run leaves its own, as config.toml.
        """
        return partial(_train, config)

    def _train(flags) -> None:
        config = checked(flags)
        with Progress(config) as progress:
            result = train(config, progress)
        if result is not None:
            present(result)

    return train_command


def _verify_command(settings: dict):
    from minipar.train.verification import DEFAULTS

    defaults = unchecked(DEFAULTS, settings)

    def verify_command(
        config: Annotated[type(defaults), tyro.conf.arg(name="")] = defaults,
        all: bool = False,
        world_size: int = 8,
        file: Annotated[Path | None, tyro.conf.arg(name="config")] = None,
    ):
        """Run a mesh and one process from one seed, and compare every tensor. Exits 1 where they differ.

        Args:
            config: the run; small, in float64, unless told otherwise.
            all: sweep every legal mesh, ZeRO stage and schedule instead of the one given.
            world_size: how many ranks the swept meshes have.
            file: a TOML file of these settings; flags win over it.
        """
        return partial(_sweep, config, world_size) if all else partial(_verify, config)

    return verify_command


def _verify(flags) -> None:
    from minipar.train.verification import table, verify

    result = verify(checked(flags))
    print(table(result))
    raise SystemExit(0 if result.equal else 1)


def _sweep(flags, world_size: int) -> None:
    from tqdm import tqdm

    from minipar.train.atomic_files import prepare_folder, write_whole
    from minipar.train.verification import legal_configs, table, verify
    from visualize.verify import draw_sweep, sweep_markdown

    config = checked(flags)
    folder = config.out or Path("runs/verify")
    prepare_folder(folder)
    configs = list(legal_configs(config, world_size))
    if not configs:
        raise ValueError(f"world_size={world_size}: no mesh of so many ranks is legal for this model")
    results = [verify(one) for one in tqdm(configs, unit="mesh")]
    draw_sweep(results, folder / "sweep.png")
    write_whole(folder / "sweep.md", sweep_markdown(results))
    wrong = [result for result in results if not result.equal]
    print(*(table(result) for result in wrong), sep="\n\n")
    print(
        f"{len(results) - len(wrong)} of {len(results)} equal one process; look in {folder}/: sweep.png, sweep.md"
    )
    raise SystemExit(1 if wrong else 0)


def _generate_command():
    def generate_command(
        run: tyro.conf.Positional[Path],
        prompt: str = "The ",
        tokens: int = 300,
        temperature: float = 0.0,
        seed: int = 0,
        tp: int = 1,
        pp: int = 1,
    ):
        """Let a trained model write: from the newest whole checkpoint of a run, on any tp x pp local ranks.

        Args:
            run: the folder of a run that was trained with --checkpoint-every.
            prompt: what it goes on from.
            tokens: how many bytes it writes.
            temperature: 0 takes the likeliest byte each time; above, bytes are drawn.
            seed: of the drawing.
            tp: tensor-parallel ranks.
            pp: pipeline ranks.
        """
        return partial(_generate, run, prompt, tokens, temperature, tp=tp, pp=pp, seed=seed)

    return generate_command


def _generate(run: Path, prompt: str, *args, **kwargs) -> None:
    from minipar.train import generate_text

    print(prompt + generate_text(run, prompt, *args, **kwargs).removeprefix(prompt))


def _export_command():
    def export_command(
        run: tyro.conf.Positional[Path], out: Path, layout: Literal["minipar", "llama"] = "minipar"
    ):
        """Write a trained model, from the newest whole checkpoint of a run, as safetensors with every weight whole.

        Args:
            run: the folder of a run that was trained with --checkpoint-every.
            out: minipar: the file to write. llama: the folder.
            layout: names of the weights: minipar's, or Hugging Face's Llama with its config.json.
        """
        return partial(_export, run, out, layout)

    return export_command


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


def _timeline_command():
    from visualize.pipeline_command import timeline_command

    @wraps(timeline_command)
    def command(*args, **kwargs):
        return partial(timeline_command, *args, **kwargs)

    return command


def _bench_command():
    def bench_command(names: tyro.conf.Positional[tuple[str, ...]] = (), quick: bool = False):
        """Time minipar against torch's own implementations, in the same run, and print the ratios as tables.

        Args:
            names: which tables; none given: all.
            quick: fewer repetitions and sizes.
        """
        return partial(_bench, names, quick)

    return bench_command


def _bench(names: tuple[str, ...], quick: bool) -> None:
    sys.path.insert(0, str(Path.cwd()))  # they are not installed, and a console script does not look here
    try:
        import benchmarks
    except ImportError:
        raise ValueError(
            "the benchmarks are not installed: run this in a checkout of the repository"
        ) from None
    benchmarks.run(names or None, quick=quick)
