"""The command line as a user meets it: one clear line for a bad request; pictures and a last line for a good one."""

import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest

from minipar.cli import main
from minipar.model import ModelConfig
from minipar.train.log import read_metrics
from minipar.train.restore import Checkpoint, newest_whole


def outcome(capsys, *argv):
    code = 0
    try:
        main(list(argv))
    except SystemExit as error:
        code = error.code
    return code, *capsys.readouterr()


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
        (["train", "--eval-every", "5", "--text", ".ci/run", "--seq-len", "64"], "too few to hold out"),
        (["generate", "no/such/run"], "no/such/run"),
        (["export", "no/such/run", "--out", "model.safetensors"], "no whole checkpoint"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_2(capsys, argv, says):
    code, out, err = outcome(capsys, *argv)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "--stps", "2"], "did you mean --steps?"),
        (["train", "--dp", "two"], "--dp: invalid literal"),
        (["train", "--dp"], "Missing value for argument '--dp'"),
        (["trian"], "did you mean train?"),
        (["fly"], "'fly' is no command; use train, verify"),
        ([], "Expected one of"),
        (["train", "--lr", "inf"], "lr=inf"),
        (["train", "--config", "no/such/file"], "No such file"),
    ],
)
def test_a_line_that_cannot_be_read_is_one_line_and_exit_2_before_torch_is_imported(argv, says):
    program = (
        "import sys; from minipar.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_names_every_command_and_flag(capsys):
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("train", "timeline", "bench"))
    code, out, _ = outcome(capsys, "train", "--help")
    assert all(flag in out for flag in ("--dp", "--steps", "--text", "--seed", "--dtype", "--out"))
    headings = ("mesh options", "model options", "memory options", "precision options", "data options")
    assert all(heading in out for heading in headings)
    assert "{gpipe,breadth-first,1f1b," in out
    for f in fields(ModelConfig):
        assert f"--model.{f.name.replace('_', '-')} " in out.replace(",", " "), f.name
        assert f.metadata["help"], f.name


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
    assert {"config.json", "model.safetensors"} == {path.name for path in (tmp_path / "llama").iterdir()}


def test_an_interrupted_run_says_so_and_leaves_a_checkpoint_that_goes_on(tmp_path):
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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while newest_whole(tmp_path / "checkpoints") is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "minipar: interrupted" in err
    checkpoint = Checkpoint(newest_whole(tmp_path / "checkpoints"))
    assert checkpoint.step >= 1
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert len(lines) >= checkpoint.step


def test_timeline_prints_the_grid_and_draws_it(capsys, tmp_path):
    code, out, _ = outcome(
        capsys, "timeline", "--stages", "3", "--microbatches", "4", "--out", str(tmp_path / "grid")
    )
    assert code == 0
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert (tmp_path / "grid.svg").stat().st_size > 0
    assert "rank" in out
