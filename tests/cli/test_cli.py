"""The command line as a user meets it: one clear line for a bad request; pictures and a last line for a good one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import minipar
from minipar.cli import COMMANDS, main
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.log import read_metrics
from tests.programs import interruptible


def outcome(capsys, *argv):
    code = 0
    try:
        main(list(argv))
    except SystemExit as error:
        code = error.code
    return code, *capsys.readouterr()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "--dp", "3"], "dp=3 does not divide batch_size=16"),
        (["train", "--dp", "0"], "dp=0"),
        (["train", "--dp", "1000", "--batch-size", "1000"], "1000 ranks on one machine"),
        (["train", "--dtype", "float33"], "invalid choice 'float33' for argument '--dtype'"),
        (["train", "--text", "no/such/file"], "No such file"),
        (["train", "--out", "/dev/null/x"], "cannot be written"),
        (["train", "--model.num-heads", "5"], "num_heads=5 does not divide dim=128"),
        (["timeline", "--schedule", "2f2b"], "2f2b"),
        (["bench", "no-such-table"], "no-such-table"),
        (["train", "--tp", "3"], "tp=3 does not divide"),
        (["train", "--on-nan", "cry"], "invalid choice 'cry' for argument '--on-nan'"),
        (["train", "--eval-every", "5", "--text", ".gitignore", "--seq-len", "64"], "too few to hold out"),
        (["generate", "no/such/run"], "no/such/run"),
        (["export", "no/such/run", "--out", "model.safetensors"], "no whole checkpoint"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_2(capsys, argv, says):
    code, out, err = outcome(capsys, *argv)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "--stps", "2"], "did you mean --steps?"),
        (["train", "--dp", "two"], "--dp: invalid literal"),
        (["train", "--dp"], "Missing value for argument '--dp'"),
        (["trian"], "did you mean train?"),
        (["train", "--help", "mesg"], "--help mesg: no such topic; use mesh, messages"),
        (["train", "--compress", "powersdg"], "did you mean powersgd? (of the package minipar)"),
        (["train", "--compress.rank", "2"], "--compress.rank is for compress=powersgd, and compress=none"),
        (
            ["train", "--compress=sign", "--compress.fraction=.1"],
            "--compress.fraction is for compress=tagc or topk, and compress=sign",
        ),
        (
            ["verify", "--compress", "powersgd", "--compress.rnk", "2"],
            "--compress.rnk is no option of compress=powersgd; use --compress.rank",
        ),
        (["train", "--tp-layout", "2.5d", "--tp-layout.depht=2"], "did you mean --tp-layout.depth?"),
        (["train", "--membership.node-size", "2"], "--membership.node-size is no option, and membership="),
        (["train", "--compress", "powersgd", "--compress.rank", "0"], "compress.rank=0"),
        (["train", "--compress"], "Missing value for argument '--compress'"),
        (["fly"], "command='fly' is unknown; use train, verify"),
        ([], "Expected one of"),
        (["train", "--lr", "inf"], "lr=inf"),
        (["train", "--weight-decay", "inf"], "weight_decay=inf"),
        (["train", "--model.rope-theta", "inf"], "rope_theta=inf"),
        (["train", "--config", "no/such/file"], "No such file"),
        (["train", "--text", "no/such/file"], "No such file"),
        (["verify", "--text", "."], "Is a directory"),
        (["train", "--resume", "missing"], "resume=missing has no whole checkpoint"),
        (["train", "--out", "/dev/null/x"], "/dev/null is not a folder"),
        (["train", "--out", ""], "--out is empty; give a value"),
        (["train", "--out="], "--out is empty; give a value"),
        (["train", "--name", "../up"], "name='../up' is not the name of one folder; use out"),
        (["train", "--batch-size", "1000000007", "--dp", "3"], "use 1 or 1000000007"),
        (["verify", "--moe", "4", "--model.num-layers", "1"], "use moe_every=1"),
        (["verify", "--all", "--world-size", "0"], "world_size=0; use a whole number"),
        (["verify", "--all", "--world-size", "7"], "no mesh of so many ranks"),
        (["train", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["timeline", "--schedule", "1fb1"], "did you mean 1f1b?"),
        (["timeline", "--stages", "0"], "stages=0; use a whole number"),
        (["timeline", "--comm", "nan"], "comm=nan"),
        (["timeline", "--costs", "1", "inf", "1"], "I=inf"),
        (
            ["timeline", "--costs", "0", "0", "0"],
            "costs=0 0 0 leave nothing to draw; use at least one above 0",
        ),
        (["timeline", "--out", "/dev/null/x"], "cannot be written"),
        (["generate", "no/such/run"], "run=no/such/run has no whole checkpoint"),
        (["export", "no/such/run", "--out", "x"], "run=no/such/run has no whole checkpoint"),
        (["serve", "no/such/run", "--requests", "x"], "run=no/such/run has no whole checkpoint"),
    ],
)
def test_a_bad_command_exits_2_with_one_line_before_torch_loads(tmp_path, argv, says):
    program = (
        "import sys; from minipar.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train", "--sequence-parallel"),
        ("train", "--model.num-kv-heads"),
        ("verify", "--world-size"),
        ("generate", "--temperature"),
        ("export", "--layout"),
        ("timeline", "--memory-limit"),
        ("bench", "--quick"),
    ],
)
def test_a_flag_with_two_letters_swapped_is_refused_with_its_name(capsys, command, flag):
    wrong = flag[:5] + flag[6] + flag[5] + flag[7:]
    required = {"generate": ["run"], "export": ["run", "--out", "x"]}.get(command, [])
    code, out, err = outcome(capsys, command, *required, wrong, "3")
    assert (code, out) == (2, "")
    assert f"did you mean {flag}?" in err
    assert len(err.splitlines()) == 1


def test_generate_and_export_refuse_bad_arguments_in_one_line(capsys, tmp_path):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    run = str(tmp_path)
    for argv, says in [
        (["generate", run, "--tokens", "-1"], "tokens=-1"),
        (["generate", run, "--temperature", "nan"], "temperature=nan"),
        (["generate", run, "--tp", "0"], "tp=0; use a whole number"),
        (["generate", run, "--seed", f"{10**20}"], f"seed={10**20} is out of range; use 0 to 2**63 - 1"),
        (["export", run, "--out", run], "is a folder; use the name of a file"),
    ]:
        code, out, err = outcome(capsys, *argv)
        assert (code, out, says in err, len(err.splitlines())) == (2, "", True, 1), err


def test_help_names_every_command_and_the_version(capsys):
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "extra of the package" not in out  # each says what it does
    assert outcome(capsys, "--version") == (0, f"minipar {version('minipar')}\n", "")


def test_help_imports_no_torch_and_no_work_of_extras():
    program = (
        "import sys; from minipar.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'matplotlib')"
        " or m.startswith('minipar.extras.') and m.count('.') > 2 and not m.endswith('.choices')], file=sys.stderr)"
    )
    for argv in (["--help"], ["train", "--help"], ["generate", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "[]\n"), argv


def test_printing_schedules_takes_no_torch_and_no_matplotlib(capsys):
    code, out, _ = outcome(capsys, "timeline", "--no-draw", "--schedule", "1f1b", "zb-h1")
    assert code == 0
    assert "rank 3" in out
    assert "wrote" not in out


def test_train_says_how_it_went_and_where_to_look(capsys, tmp_path):
    small = [
        "--model.dim",
        "16",
        "--model.num-layers",
        "1",
        "--model.num-heads",
        "2",
        "--batch-size",
        "4",
        "--seq-len",
        "32",
    ]
    code, out, err = outcome(
        capsys, "train", "--dp", "2", "--steps", "4", "--verify-steps", "2", "--out", str(tmp_path), *small
    )
    assert code == 0, err
    assert "first 2 steps against one process: largest difference in loss" in out
    assert f"look in {tmp_path}/" in out.splitlines()[-1]
    for name in ("loss.png", "timeline.png", "trace.json", "metrics.jsonl", "sample.txt"):
        assert (tmp_path / name).stat().st_size > 0, name


def test_what_was_trained_writes_and_is_exported(capsys, tmp_path):
    run, flags = (
        str(tmp_path / "run"),
        ["--model.dim", "16", "--model.num-layers", "2", "--verify-steps", "0"],
    )
    code, _, err = outcome(
        capsys, "train", "--dp", "2", "--steps", "2", "--checkpoint-every", "2", "--out", run, *flags
    )
    assert code == 0, err
    code, out, _ = outcome(capsys, "generate", run, "--prompt", "def ", "--tokens", "8", "--tp", "2")
    assert code == 0
    assert out.startswith("def ")
    code, again, _ = outcome(capsys, "generate", run, "--prompt", "def ", "--tokens", "8", "--pp", "2")
    assert again == out
    code, out, _ = outcome(capsys, "export", run, "--out", str(tmp_path / "whole.safetensors"))
    assert (code, (tmp_path / "whole.safetensors").stat().st_size > 0) == (0, True)
    code, out, _ = outcome(capsys, "export", run, "--out", str(tmp_path / "llama"), "--layout", "llama")
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } == {path.name for path in (tmp_path / "llama").iterdir()}


@pytest.mark.thorough
def test_an_interrupted_run_says_so_and_leaves_a_checkpoint(tmp_path):
    command = [
        sys.executable,
        "-m",
        "minipar",
        "train",
        "--dp",
        "2",
        "--out",
        str(tmp_path),
        "--model.dim",
        "16",
    ]
    command += ["--checkpoint-every", "1", "--steps", "2000", "--verify-steps", "0", "--batch-size", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    )
    try:
        deadline = time.monotonic() + 300
        while newest_whole(tmp_path / "checkpoints") is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "minipar: stopped and saved after step" in err
    checkpoint = Checkpoint(newest_whole(tmp_path / "checkpoints"))
    assert checkpoint.step >= 1
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert len(lines) >= checkpoint.step - 1  # ranks may save once more before they are ended


def test_a_reader_that_stops_reading_is_no_error():
    command = [sys.executable, "-m", "minipar", "quiz", "--json"]  # more than a pipe holds
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout.read(1) == b"["
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 141


def test_timeline_prints_the_grid_and_draws_it(capsys, tmp_path):
    code, out, _ = outcome(
        capsys, "timeline", "--stages", "3", "--microbatches", "4", "--out", str(tmp_path / "grid")
    )
    assert code == 0
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert (tmp_path / "grid.svg").stat().st_size > 0
    assert "rank" in out


def test_each_schedule_gets_only_the_arguments_it_takes(capsys):
    pytest.importorskip("ortools", reason="optimal needs OR-tools: pip install 'minipar[optimal]'")
    small = ["--no-draw", "--stages", "2", "--microbatches", "2", "--memory-limit", "2", "--slices", "2"]
    code, out, err = outcome(
        capsys, "timeline", "--schedule", "1f1b", "optimal", "zb-auto", "seq1f1b", *small
    )
    assert code == 0, err
    heads = [block.splitlines()[0] for block in out.split("\n\n") if block.strip()]
    assert [head.split(":")[0] for head in heads] == ["1f1b", "optimal", "zb-auto", "seq1f1b"]
    assert ["slices" in head for head in heads] == [False, False, False, True]
    code, _, err = outcome(capsys, "timeline", "--schedule", "1f1b", *small)
    assert (code, err) == (2, "minipar: slices=2 is no argument of schedule='1f1b'; leave it out\n")
    code, _, err = outcome(capsys, "timeline", "--schedule", "1f1b", "seq1f1b", *small)
    assert (code, err) == (2, "minipar: memory_limit=2.0 is no argument of schedule='1f1b'; leave it out\n")
    code, _, err = outcome(capsys, "train", "--schedule", "optimal")
    assert (code, "schedule='optimal' is unknown" in err) == (2, True)


@pytest.mark.thorough
def test_bench_takes_the_checkouts_benchmarks_from_any_folder(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('the wrong benchmarks')")
    done = run_in(tmp_path, Path(minipar.__file__).parents[1], "bench", "no-such-table")
    assert done.returncode == 2
    assert "names='no-such-table' is no benchmark; use collectives" in done.stderr


def test_without_a_checkout_bench_and_explore_say_so(tmp_path):
    package, without = Path(minipar.__file__).parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "installed" / "minipar", ignore=without)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('the wrong benchmarks')")
    for command, says in [("bench", "clone the project"), ("explore", "give its build/site by --site")]:
        done = run_in(tmp_path, tmp_path / "installed", command)
        assert (done.returncode, says in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


def run_in(folder, package_root, *argv):
    """The command, with minipar imported from `package_root`, and started in a folder of the user's."""
    return subprocess.run(
        [sys.executable, "-m", "minipar", *argv],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package_root)},
    )
