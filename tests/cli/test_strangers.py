"""An extra of a stranger's is shown, trains, is verified and refused like ours; a broken one harms nobody else."""

import json

import pytest

from tests.support.packages import install, run_with

CHOICES = '''
from dataclasses import dataclass

from minipar.config.choices import Averaging
from minipar.schedules import Action, Schedule
from minipar.schedules.registry import ScheduleChoice
from minipar.support.options import option


def lifo(p, m):
    """Every forward, then the backwards from the last microbatch to the first."""
    forwards = [[Action("F", rank, k) for k in range(m)] for rank in range(p)]
    backwards = [[Action("B", rank, k) for k in reversed(range(m))] for rank in range(p)]
    return Schedule(tuple(tuple(f + b) for f, b in zip(forwards, backwards)), tuple(range(p)), m, "lifo")


class Lifo(ScheduleChoice):
    def check(self, config):
        if config.microbatches % 2:
            raise ValueError(f"schedule=lifo: microbatches={config.microbatches} is odd; use an even number")


@dataclass(frozen=True)
class GatherOptions:
    """Of the mean."""

    scale: float = option(1.0, "factor of the mean, wrong but for 1")


class Gathered(Averaging):
    def check(self, config):
        if not config.options["compress"].scale:
            raise ValueError("compress.scale=0.0 leaves no gradient; use 1")


LIFO = Lifo(lifo, help="the last microbatch comes back first")
GATHERED = Gathered("stranger.averaging:Gathered", "gathers, then adds", GatherOptions)
'''
AVERAGING = """
from minipar.train.averaging import Averager


class Gathered(Averager):
    def reduce_bucket(self, bucket):
        def reduce():
            bucket.flat.copy_(self.scale * bucket.comm.all_gather(bucket.flat[None]).sum(0))

        return bucket.comm.custom("gathered", reduce, async_op=True)

    def __init__(self, config):
        super().__init__(config)
        self.scale = config.options["compress"].scale
"""
COMMAND = '''
from dataclasses import dataclass

from minipar.support.options import option
from minipar.support.registry import Choice


def greet_command(name: str = "you"):
    """Greet somebody.

    Args:
        name: who it is.
    """
    return lambda: print(f"hello {name}")


def count(config, options):
    print(f"{config.steps} steps of {config.world_size} ranks, times {options.times}")
    return options.times - 1


@dataclass(frozen=True)
class CountOptions:
    times: int = option(1, "a factor")


COUNT = Choice("stranger.command:count", "count the steps", CountOptions)
REFUSE = Choice("stranger.not_there:refuse", "refuse")
GREET = Choice("stranger.command:greet_command", "greet somebody")
GONE = Choice("stranger.not_there:command", "gone")
'''
EXTRAS = {
    "schedule.lifo": "stranger.choices:LIFO",
    "compress.gathered": "stranger.choices:GATHERED",
    "instead.count_steps": "stranger.command:COUNT",
    "instead.refuse": "stranger.command:REFUSE",
    "instead.lost": "stranger.lost:LOST",
    "command.greet": "stranger.command:GREET",
    "command.gone": "stranger.command:GONE",
}
SMALL = "--model.dim 16 --model.num-layers 2 --model.num-heads 2 --model.num-kv-heads 2 --seq-len 32"
# Several commands in one process, which starts its ranks once: the exit status and the output of each, as JSON.
SEVERAL = """
import contextlib, io, json, sys
from minipar.cli import main

results = []
for argv in json.loads(sys.argv[1]):
    code, out = 0, io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(argv)
        except SystemExit as end:
            code = end.code
    results.append([code, out.getvalue()])
print(json.dumps(results))
"""


@pytest.fixture
def packages(tmp_path):
    """A folder in which the stranger's package is installed."""
    folder = tmp_path / "site"
    install(folder, "stranger", EXTRAS, choices=CHOICES, averaging=AVERAGING, command=COMMAND)
    return folder


@pytest.fixture
def minipar_with(packages, tmp_path):
    """The command with the packages in that folder: (exit status, stdout, stderr)."""

    def run(*argv):
        done = run_with(packages, "-m", "minipar", *argv, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


def several(folder, cwd, *lines):
    done = run_with(folder, "-c", SEVERAL, json.dumps([line.split() for line in lines]), cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_help_lists_a_strangers_choices_with_their_options(minipar_with):
    code, out, err = minipar_with("train", "--help", "schedule")
    assert (code, err) == (0, "")
    assert "  lifo            the last microbatch comes back first (package stranger)\n" in out
    code, out, err = minipar_with("train", "--help", "compress")
    assert (code, err) == (0, "")
    assert "  gathered        gathers, then adds (package stranger)\n      --compress.scale FLOAT" in out
    assert "gathered" in minipar_with("train", "--help")[1]
    assert "F3" in minipar_with("timeline", "--no-draw", "--microbatches", "4", "--schedule", "lifo")[1]


@pytest.mark.thorough
def test_a_strangers_choices_train_and_are_verified(packages, tmp_path):
    results = several(
        packages, tmp_path,
        f"train --dp 2 --compress gathered --compress.scale 1 --steps 3 --batch-size 4 --out run {SMALL}",
        "train --config run/config.toml --steps 2 --out again",
        f"verify --pp 2 --microbatches 2 --schedule lifo --steps 2 {SMALL}",
        f"verify --dp 2 --compress gathered --steps 2 {SMALL}",
        f"verify --dp 2 --compress gathered --compress.scale 1.5 --steps 2 {SMALL}",
    )  # fmt: skip
    assert [code for code, _ in results] == [0, 0, 0, 0, 1], results
    trained, again, *_ = (out for _, out in results)
    assert "first 3 steps against one process: largest difference in loss" in trained
    assert "in 2 steps" in again
    toml = (tmp_path / "again" / "config.toml").read_text()
    assert '[compress]\nname = "gathered"\nscale = 1.0\n' in toml


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "train --pp 2 --microbatches 1 --schedule lifo",
            "schedule=lifo: microbatches=1 is odd; use an even",
        ),
        ("train --compress gathered --compress.scale 0", "compress.scale=0.0 leaves no gradient; use 1"),
        ("train --compress gatherd", "did you mean gathered? (of the package stranger)"),
        ("train --compress sign --compress.scale 2", "--compress.scale is for compress=gathered"),
        ("train --compress gathered --compress.scael 2", "did you mean --compress.scale?"),
        ("train --compress gathered --compress.scale big", "Error parsing --compress.scale"),
    ],
)
def test_a_strangers_choices_are_refused_in_words(minipar_with, line, says):
    code, out, err = minipar_with(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert says in err


def test_a_strangers_command_is_a_command(minipar_with):
    code, out, _ = minipar_with("--help")
    assert code == 0
    assert "greet" in out
    assert "An extra of the package stranger." in out
    assert minipar_with("greet", "--name", "Ada") == (0, "hello Ada\n", "")
    code, out, err = minipar_with("gone")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        "command='gone' is stranger.not_there:command, which cannot be imported: ModuleNotFoundError" in err
    )


def test_a_stranger_does_something_instead_of_training(packages, tmp_path):
    lines = {
        "train --dp 2 --steps 7 --count-steps": (0, "7 steps of 2 ranks, times 1\n"),
        "train --steps 7 --count-steps --times 3": (2, "7 steps of 1 ranks, times 3\n"),
        "train --times 3": (2, "--times is an option of --count-steps; use that, too, or leave it out\n"),
        "train --count-steps --refuse": (2, "--count-steps and --refuse: each replaces training; use one of them\n"),
        "train --dp 3 --count-steps": (2, "dp=3"),
        "train --refuse": (2, "instead='refuse' is stranger.not_there:refuse, which cannot be imported: Module"),
        "train --lost": (2, "instead='lost' is stranger.lost:LOST of the package stranger, which cannot be imported"),
    }  # fmt: skip
    for (line, (code, says)), (left, out) in zip(
        lines.items(), several(packages, tmp_path, *lines), strict=True
    ):
        assert (left, out.count("\n")) == (code, 1), (line, out)
        assert says in out, line
    assert list(tmp_path.iterdir()) == [packages]


@pytest.mark.thorough
def test_two_extras_of_one_name_are_both_named_and_refused(packages, minipar_with):
    install(packages, "rival", {"compress.gathered": "rival.choices:GATHERED"}, choices=CHOICES)
    code, out, err = minipar_with("train", "--compress", "gathered", "--steps", "1", "--verify-steps", "0")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is the name of two" in err
    assert "stranger.choices:GATHERED of the package stranger" in err
    assert "rival.choices:GATHERED of the package rival" in err
    assert "microbatches=1 is odd" in minipar_with("train", "--pp", "2", "--schedule", "lifo")[2]
    code, out, _ = minipar_with("train", "--help", "compress")
    assert (code, "is the name of two" in " ".join(out.split()), "  powersgd " in out) == (0, True, True)


@pytest.mark.thorough
def test_an_extra_that_cannot_be_imported_is_one_line(packages, minipar_with):
    broken = {"compress.broken": "broken.choices:X", "command.broken": "broken.choices:X"}
    install(packages, "broken", broken, init="raise RuntimeError('of my\\nown')", choices="")
    for line in ("train --compress broken", "verify --compress=broken", "broken"):
        code, out, err = minipar_with(*line.split())
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert (
            "broken.choices:X of the package broken, which cannot be imported: RuntimeError: of my own" in err
        )
    code, out, err = minipar_with("train", "--help", "compress")
    assert (code, err) == (0, "")
    assert "cannot be imported: RuntimeError: of my own" in " ".join(out.split())
    assert "  gathered " in out
    for line in ("--help", "train --help-all", "--tyro-print-completion bash", "timeline --no-draw"):
        code, out, err = minipar_with(*line.split())
        assert (code, err) == (0, ""), line


def test_an_extra_whose_work_cannot_be_imported_is_one_line(packages, minipar_with):
    (packages / "stranger" / "averaging.py").write_text("import not_there_at_all")
    code, out, err = minipar_with("train", "--compress", "gathered", "--dp", "2", "--out", "run")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert (
        "compress='gathered' is stranger.averaging:Gathered, which cannot be imported: ModuleNotFound" in err
    )
