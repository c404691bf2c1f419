"""The `minipar` command. What draws imports visualize here, when it draws."""

# No postponed annotations: tyro reads them, and those of `_train_command` are imported inside it.

import sys
from typing import Annotated

from minipar.errors import RankError

DESCRIPTION = "Distributed training, every piece written by hand and proved equal to one process."


def main(argv: list[str] | None = None) -> None:
    """Exit 0 when done, 2 with one line for a bad request, 1 where a rank failed, 130 after Ctrl-C."""
    import tyro

    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "train": _train_command(),
                "verify": _verify_command(),
                "timeline": _timeline_command(),
                "bench": bench,
            },
            prog="minipar",
            description=DESCRIPTION,
            args=argv,
        )
    except ValueError as error:
        _leave(f"minipar: {error}", 2)
    except RankError as error:
        _leave(f"minipar: {error}", 1)
    except KeyboardInterrupt:
        _leave("minipar: interrupted", 130)


def _leave(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _train_command():
    import tyro

    from minipar.train import TrainConfig, train

    def train_command(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> None:
        """Train a byte-level model on text, on local ranks or as one of torchrun's, and compare with one process."""
        with _Progress(config) as progress:
            result = train(config, progress)
        if result is not None:
            _present(result)

    return train_command


def _verify_command():
    from pathlib import Path

    import tyro

    from minipar.train.config import TrainConfig
    from minipar.train.verify import DEFAULTS, legal_configs, table, verify

    def verify_command(
        config: Annotated[TrainConfig, tyro.conf.arg(name="")] = DEFAULTS,
        all: bool = False,
        world_size: int = 8,
    ) -> None:
        """Run a mesh and one process from one seed, and compare every tensor. Exits 1 where they differ.

        Args:
            config: the run; small, in float64, unless told otherwise.
            all: sweep every legal mesh, ZeRO stage and schedule instead of the one given.
            world_size: how many ranks the swept meshes have.
        """
        if not all:
            result = verify(config)
            print(table(result))
            raise SystemExit(0 if result.equal else 1)
        from tqdm import tqdm

        from visualize.verify import draw_sweep, sweep_markdown

        configs = list(legal_configs(config, world_size))
        if not configs:
            raise ValueError(f"world_size={world_size}: no mesh of so many ranks is legal for this model")
        results = [verify(one) for one in tqdm(configs, unit="mesh")]
        folder = config.out or Path("runs/verify")
        folder.mkdir(parents=True, exist_ok=True)
        draw_sweep(results, folder / "sweep.png")
        (folder / "sweep.md").write_text(sweep_markdown(results))
        wrong = [result for result in results if not result.equal]
        print(*(table(result) for result in wrong), sep="\n\n")
        print(
            f"{len(results) - len(wrong)} of {len(results)} equal one process; look in {folder}/: sweep.png, sweep.md"
        )
        raise SystemExit(1 if wrong else 0)

    return verify_command


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

    return timeline_command


def bench(names: tuple[str, ...] = (), quick: bool = False) -> None:
    """Time minipar against torch's own implementations, in the same run, and print the ratios as tables.

    Args:
        names: which tables; none given: all.
        quick: fewer repetitions and sizes.
    """
    try:
        import benchmarks
    except ImportError:
        raise ValueError(
            "the benchmarks are not installed: run this in a checkout of the repository"
        ) from None
    benchmarks.run(names or None, quick=quick)
