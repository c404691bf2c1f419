"""The `minipar` command. What draws imports visualize here, when it draws."""

# No postponed annotations: tyro reads them, and those of `_train_command` are imported inside it.

import dataclasses
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Annotated

from minipar.errors import RankError

DESCRIPTION = "Distributed training, every piece written by hand and proved equal to one process."


def main(argv: list[str] | None = None) -> None:
    """Exit 0 when done, 2 with one line for a bad request, 1 where a rank failed, 130 after Ctrl-C."""
    import tyro

    try:
        command = tyro.extras.subcommand_cli_from_dict(
            {
                "train": _train_command(),
                "verify": _verify_command(),
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


def _unchecked(config):
    """The same configuration, of a class that takes any values: it is checked when the command runs."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for f in dataclasses.fields(
        config
    ):  # what was derived from other fields is derived again from what they become
        if f.default is None and dataclasses.replace(config, **{f.name: None}) == config:
            fields[f.name] = None
    namespace = {"__post_init__": lambda self: None, "__doc__": type(config).__doc__, "__annotations__": {}}
    for name, value in fields.items():
        if dataclasses.is_dataclass(value):
            fields[name] = _unchecked(value)
            namespace["__annotations__"][name] = type(fields[name])
            namespace[name] = dataclasses.field(default=fields[name])
    flags = dataclasses.dataclass(frozen=True)(type(type(config).__name__, (type(config),), namespace))
    return flags(**fields)


def _checked(flags):
    """The configuration of these flags. Raises ValueError for one that cannot be."""
    fields = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags)}
    fields = {
        name: _checked(value) if dataclasses.is_dataclass(value) else value for name, value in fields.items()
    }
    return type(flags).__mro__[1](**fields)


def _train_command():
    import tyro

    from minipar.train import TrainConfig, train

    defaults = _unchecked(TrainConfig())

    def train_command(config: Annotated[type(defaults), tyro.conf.arg(name="")] = defaults):
        """Train a byte-level model on text, on local ranks or as one of torchrun's, and compare with one process."""
        return partial(_train, config)

    def _train(flags) -> None:
        config = _checked(flags)
        with _Progress(config) as progress:
            result = train(config, progress)
        if result is not None:
            _present(result)

    return train_command


def _verify_command():
    import tyro

    from minipar.train.verify import DEFAULTS

    defaults = _unchecked(DEFAULTS)

    def verify_command(
        config: Annotated[type(defaults), tyro.conf.arg(name="")] = defaults,
        all: bool = False,
        world_size: int = 8,
    ):
        """Run a mesh and one process from one seed, and compare every tensor. Exits 1 where they differ.

        Args:
            config: the run; small, in float64, unless told otherwise.
            all: sweep every legal mesh, ZeRO stage and schedule instead of the one given.
            world_size: how many ranks the swept meshes have.
        """
        return partial(_sweep, config, world_size) if all else partial(_verify, config)

    return verify_command


def _verify(flags) -> None:
    from minipar.train.verify import table, verify

    result = verify(_checked(flags))
    print(table(result))
    raise SystemExit(0 if result.equal else 1)


def _sweep(flags, world_size: int) -> None:
    from tqdm import tqdm

    from minipar.train.record import prepare_folder, write_whole
    from minipar.train.verify import legal_configs, table, verify
    from visualize.verify import draw_sweep, sweep_markdown

    config = _checked(flags)
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


class _Progress:
    """A bar for the steps, then one for the steps that are run again. Only rank 0 of torchrun draws."""

    def __init__(self, config):
        self._totals = {"train": config.steps, "verify": min(config.verify_steps, config.steps)}
        self._bar, self._what = None, None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, metrics: dict) -> None:
        from tqdm import tqdm

        if what != self._what:
            self.__exit__()
            label = {"train": "train", "verify": "again on one process"}[what]
            self._bar, self._what = tqdm(total=self._totals[what], desc=label, unit="step"), what
        if "loss" in metrics:
            self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:,.0f} tokens/s")
        self._bar.update()


def _present(result) -> None:
    """Draw the run's pictures, and say what happened and where to look."""
    from visualize.trace import draw_trace
    from visualize.training import draw_training

    again = None if result.reference is None else {"one process, again": result.reference.losses}
    draw_training(result.metrics, result.folder / "loss.png", reference=again)
    if any(result.traces.values()):
        draw_trace(result.traces, result.folder / "timeline.png")
    first, last = result.metrics[0], result.metrics[-1]
    print(f"\n{result.sample}\n")
    print(f"loss {first['loss']:.3f} -> {last['loss']:.3f} in {len(result.metrics)} steps")
    if result.difference is not None:
        print(result.difference)
    print(
        f"look in {result.folder}/: loss.png, timeline.png, trace.json (open it in ui.perfetto.dev), "
        "metrics.jsonl, sample.txt"
    )


def _timeline_command():
    from visualize.pipeline_command import timeline_command

    @wraps(timeline_command)
    def command(*args, **kwargs):
        return partial(timeline_command, *args, **kwargs)

    return command


def _bench_command():
    import tyro

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
