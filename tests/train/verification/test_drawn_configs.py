"""Drawn configurations equal one process. Each can be run again by its number; `make soak` draws others in every run."""

import os
import secrets
import shutil
import time
from dataclasses import fields, replace

import pytest
from hypothesis import settings

from minipar.config.check_paths import CHECKPOINTS
from minipar.config.choices import CHOSEN
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.run.elastic import mesh_for
from minipar.train import train
from minipar.train.checkpoint.restore import checkpoints
from minipar.train.data.text import hold_out, load_data
from minipar.train.reference import relative, train_in_one_process
from minipar.train.verification.verify import TOLERANCE, table, verify
from tests.examples import ALL
from tests.train.verification.drawn_configs import NOT_DRAWN, UNCOMPARED, Files, drawn_config, options_of

MOST_DRAWS = 2000  # in which every option must have had two values


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files.write(tmp_path_factory.mktemp("drawn"))


# What is drawn --------------------------------------------------------------------------------------------------------


def names_to_draw() -> set[str]:
    """Every option of the trainer, the model and this package's choices, by the names of `options_of`."""
    names = {f.name for f in fields(TrainConfig)} - NOT_DRAWN.keys() - {"model", "options"}
    names |= {f"model.{f.name}" for f in fields(ModelConfig)}
    for name, choice in choices_to_draw():
        own = CHOSEN[name][choice].options
        names |= {f"{name}={choice}.{f.name}" for f in fields(own)} if own else set()
    return names


def choices_to_draw() -> set[tuple[str, str]]:
    """Every choice by name that this package brings, with its field."""
    return {
        (name, choice)
        for name, kind in CHOSEN.items()
        for choice in kind
        if kind.extras().get(choice, "minipar") == "minipar" and choice not in UNCOMPARED
    }


@pytest.mark.thorough
def test_every_option_and_every_choice_is_drawn(files):
    assert NOT_DRAWN.keys() <= {f.name for f in fields(TrainConfig)}
    missing, choices, first = names_to_draw(), choices_to_draw(), {}
    for number in range(MOST_DRAWS):
        config = drawn_config(0, number, files)
        for name, value in options_of(config).items():
            if str(first.setdefault(name, value)) != str(value):
                missing.discard(name)
        choices -= {(name, getattr(config, name)) for name in CHOSEN}
        if not missing and not choices:
            return
    raise AssertionError(
        f"{sorted(missing)} and {sorted(choices)}: draw them in drawn_configs.py, or say there why they decide no number"
    )


# Comparisons ----------------------------------------------------------------------------------------------------------


def why_unequal(config: TrainConfig, folder) -> str | None:
    """Return how a run of this configuration differs from one process; None if it does not."""
    try:
        if config.checkpoint_every:
            return why_run_unequal(config, folder)
        result = verify(config)
        if config.compile == "inductor" and result.difference <= 1e-4:
            # rotary angles are float32 in every dtype, and inductor rounds their cosines otherwise
            return None
        if not result.equal and config.dtype == "float32":
            # A gradient may be nothing but float32's rounding; any other difference is there in float64, too.
            config = replace(config, dtype="float64", reduce_dtype=None)
            result = verify(config)
    except (
        Exception
    ) as error:  # what is drawn is legal: any error is one to report, and the next draw goes on
        return f"{type(error).__name__}: {error}"
    return None if result.equal else table(result).splitlines()[-1]


def why_run_unequal(config: TrainConfig, folder) -> str | None:
    """Compare a whole run, and where it resumes, the second run from the first checkpoint, with one process."""
    text, _ = load_data(config)
    if config.eval_every:
        text, _ = hold_out(text, config.seq_len)
    want = train_in_one_process(config, text, config.steps)
    first = replace(config, out=folder, resume=None, membership="fixed")
    result = train(first)
    limit = TOLERANCE[config.dtype]
    runs = {"the run": result.metrics}
    if result.difference is not None and max(result.difference[1:4]) > 10 * limit:
        return str(result.difference)
    if config.resume is not None:
        for path in checkpoints(folder / CHECKPOINTS)[:-1]:
            shutil.rmtree(path)
        again = replace(first, resume=folder)
        if config.membership == "elastic":
            again = mesh_for(again, 1 + config.seed % 8).config
        runs[f"the run that went on with {again.mesh_name}"] = train(again).metrics
    for what, metrics in runs.items():
        for line in metrics:
            for name, values in (("loss", want.losses), ("grad_norm", want.grad_norms)):
                apart = relative(abs(line[name] - values[line["step"]]), abs(values[line["step"]]))
                if apart > limit:
                    return f"{what}: {name} of step {line['step']} differs by {apart:.1e}"
    return None


def draw(files: Files, seed: int, first: int, count: int, minutes: float = 0.0) -> tuple[int, list[str]]:
    """Compare drawn configurations, `count` of them or for so many minutes; return how many, and what fell."""
    fallen, number, begin_s, told_s = [], first, time.monotonic(), time.monotonic()
    while number < first + count and not (minutes and time.monotonic() - begin_s > 60 * minutes):
        config, folder = drawn_config(seed, number, files), files.folder / "out"
        if (why := why_unequal(config, folder)) is not None:
            fallen.append(f"DRAW_SEED={seed} FIRST_DRAW={number} DRAWS=1: {why}\n{config}")
            print(f"\n{fallen[-1]}", flush=True)
        for made in (folder, *files.folder.glob("llama-*")):
            shutil.rmtree(made, ignore_errors=True)
        number += 1
        if time.monotonic() - told_s > 60:
            told_s = time.monotonic()
            print(f"{number - first} drawn, {len(fallen)} fell", flush=True)
    return number - first, fallen


def test_a_few_drawn_configurations_equal_one_process(files):
    _, fallen = draw(files, 0, 0, max(1, 3 * settings().max_examples // ALL))
    assert not fallen


@pytest.mark.thorough
def test_drawn_configurations_equal_one_process(files):
    _, fallen = draw(files, 0, 3, 197)
    assert not fallen


@pytest.mark.slow
def test_freshly_drawn_configurations_equal_one_process(files, capsys):
    """DRAWS of them, or for half of SOAK_MINUTES; of a new seed unless DRAW_SEED gives one, from number FIRST_DRAW on."""
    minutes = float(os.environ.get("SOAK_MINUTES", 0)) / 2
    seed = int(os.environ.get("DRAW_SEED", secrets.randbelow(1 << 31)))
    first = int(os.environ.get("FIRST_DRAW", 0))
    count = int(os.environ.get("DRAWS", 10**9 if minutes else 2000))
    with capsys.disabled():
        drawn, fallen = draw(files, seed, first, count, minutes)
        print(f"\nDRAW_SEED={seed}: {drawn - len(fallen)} of {drawn} equal one process")
    assert not fallen
