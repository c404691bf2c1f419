"""The command `minipar exercise`, as a learner types it, and plain pytest in the folder."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minipar.cli.report import draw_exercise
from minipar.learn.exercises import command as command_module
from minipar.learn.exercises.command import exercise_command
from minipar.learn.exercises.registry import EXERCISES, find_exercise
from tests.learn.exercises.test_containment import RIGHT

run_command = exercise_command(draw_exercise)


def outcome(capsys, *args, **options):
    """(exit code, what was printed) of the command, called as tyro calls it."""
    code = 0
    try:
        run_command(*args, **options)()
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "exercises"


def test_from_the_first_line_to_green_with_a_picture(capsys, folder, monkeypatch):
    seconds = iter((10.0, 10.0, 10.0, 12.5))  # each check reads the clock when it begins and when it ends
    monkeypatch.setattr(
        sys.modules["minipar.learn.exercises.check"],
        "time",
        SimpleNamespace(perf_counter=lambda: next(seconds)),
    )
    assert "0 of" in outcome(capsys, "list")[1]
    code, out = outcome(capsys, "start", "shift")
    assert "exercises/shift.py: Pass to the right" in out
    code, out = outcome(capsys, "check", "shift")
    assert code == 1
    assert out.startswith("shift: TODO  shift.py, line ")
    (folder / "shift.py").write_text(RIGHT)
    code, out = outcome(capsys, "check", "shift")
    assert code == 0
    assert out.splitlines() == [out.splitlines()[0], "your run: exercises/shift.png"]
    assert "shift: GREEN  it runs, right on one small case, right on drawn cases, the bytes sent" in out
    assert "(2.5 s)" in out
    assert (folder / "shift.png").stat().st_size > 10_000
    assert "1 of" in outcome(capsys, "list")[1]


def test_the_last_hint_alone_names_the_solution(capsys, folder):
    outcome(capsys, "start", "shift")
    hints = [outcome(capsys, "hint", "shift")[1] for _ in find_exercise("shift").hints]
    assert len(hints) > 1
    assert ["minipar exercise solution shift" in hint for hint in hints] == [False] * (len(hints) - 1) + [
        True
    ]


def test_a_schedule_is_drawn_as_text(capsys, folder):
    folder.mkdir()
    (folder / "gpipe.py").write_text("from minipar.schedules import gpipe")
    code, out = outcome(capsys, "check", "gpipe")
    assert code == 0
    assert "rank 3   ·  ·  ·  F0" in out


def test_list_and_check_as_json(capsys, folder):
    rows = json.loads(outcome(capsys, "list", json=True)[1])
    assert [row["name"] for row in rows] == [exercise.name for exercise in EXERCISES]
    assert rows[1] == {"name": "broadcast", "minutes": 25, "needs": ["shift"], "state": "-"}
    folder.mkdir()
    (folder / "shift.py").write_text("def shift(comm, x):\n    print('hello')\n    return x")
    code, out = outcome(capsys, "check", "shift", json=True)
    result = json.loads(out)
    assert (code, result["state"], result["stage"], result["met"]) == (1, "red", "small", ["runs"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("check", "shft"), "name='shft' is no exercise; did you mean shift?"),
        (("start", "flight"), "`minipar exercise list` names them all"),
        (("check", ""), "is no exercise"),
        (("check", "shift"), "exercises/shift.py does not exist; `minipar exercise start shift` writes it"),
        (
            ("check", "shift", "mine"),
            "mine/shift.py does not exist; `minipar exercise start shift mine` writes it",
        ),
        (("check", "shift", "no/such.py"), "no/such.py does not exist"),
        (("hint", "shift"), "does not exist"),
        (("solution", "shft"), "did you mean shift?"),
    ],
)
def test_a_bad_request_is_one_line(args, says, folder, capsys):

    *words, last = args
    with pytest.raises(ValueError) as error:
        run_command(*words, Path(last) if len(args) == 3 else last)()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_elsewhere_can_be_checked(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def shift(comm, x)\n")
    code, out = outcome(capsys, "check", "shift", tmp_path / "mine.py")
    assert code == 1
    assert "RED  the file: mine.py, line 1: SyntaxError" in out


def test_the_solution_is_the_source_that_runs(capsys):
    _, out = outcome(capsys, "solution", "all-gather")
    assert out.startswith("# minipar/simple/collectives.py, from line ")
    assert "return torch.cat(chunks)" in out
    _, out = outcome(capsys, "solution", "vocab_loss")
    assert "class CrossEntropy(Function):" in out  # a helper comes with it
    assert "def embedding" not in out


def test_watch_checks_again_when_the_file_is_saved(capsys, folder, monkeypatch):
    """The first look at the file, after the first check, finds it saved again; the second look is interrupted."""
    folder.mkdir()
    file, checks = folder / "shift.py", []
    file.write_text("def shift(comm, x)\n")
    check_once = command_module._check_once

    def counted(*args):
        checks.append(file.read_text())
        return check_once(*args)

    def sleep(seconds):
        if len(checks) == 2:
            raise KeyboardInterrupt
        file.write_text("def shift(comm, x: int)\n")

    monkeypatch.setattr(command_module, "_check_once", counted)
    monkeypatch.setattr(command_module, "time", type("Clock", (), {"sleep": staticmethod(sleep)}))
    with pytest.raises(KeyboardInterrupt):
        run_command("check", "shift", watch=True)()
    assert checks == ["def shift(comm, x)\n", "def shift(comm, x: int)\n"]
    assert capsys.readouterr().out.count("SyntaxError") == 2


@pytest.mark.thorough
def test_plain_pytest_in_the_folder_checks_what_was_started(capsys, folder):
    outcome(capsys, "start", "gpipe")
    outcome(capsys, "start", "mesh")
    outcome(capsys, "start", "zb_h1")
    (folder / "gpipe.py").write_text("from minipar.schedules import gpipe")
    (folder / "mesh.py").write_text("def groups(*axes, pp=1, dp=1, cp=1, tp=1): return []")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "rank 0 is in 0 groups; it should be in one" in done.stdout
    assert "still to be written" in done.stdout


def test_asking_for_the_list_imports_no_torch():
    program = "import sys, minipar.learn.exercises.command; print(*({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
