"""The project: a folder of ten pieces, checked in words, and trained with what is written so far."""

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from minipar.learn.exercises import project
from minipar.learn.exercises.command import exercise_command
from minipar.learn.exercises.project import check_project, fault, is_written, start
from minipar.learn.exercises.registry import STEPS, find_exercise
from minipar.simple import train

FLOOR = Path(train.__file__).parent
BY_FILE = {step.file: step for step in STEPS}


def solution(file: str, stub: str) -> str:
    """The floor's file as a learner would have it: of train.py, what is asked for, in the stub's frame."""
    source = (FLOOR / f"{file}.py").read_text()
    source = re.sub(r"^from \.(\w*) import", r"from minipar.simple.\1 import", source, flags=re.M)
    source = source.replace("minipar.simple. import", "minipar.simple import")
    if file != "train":
        return source
    asked = source[source.index("def train(") : source.index("def partial_loss(")]
    head, tail = stub[: stub.index("def train(")], stub[stub.index("if __name__") :]
    return f"{head}import torch\nfrom torch import nn\n\n\n{asked}{tail}"


def solve(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / f"{name}.py"
        path.write_text(solution(name, path.read_text()))


@pytest.fixture
def folder(tmp_path):
    start(tmp_path)
    return tmp_path


def checked(folder):
    lines = []
    return check_project(folder, lines.append), lines


def test_a_fresh_project_is_ten_stubs_to_write(folder):
    assert [step.file for step in STEPS if is_written(step, folder)] == []
    ok, lines = checked(folder)
    assert ok
    assert len(STEPS) == 10
    assert all("to write" in line for line in lines[:10])
    assert "0 of 10 are green; next: " in lines[10]
    assert f"then check it with `minipar exercise project {folder}`" in lines[10]


def test_a_stub_asks_for_what_the_floor_has(folder):
    for step in STEPS:
        for name in step.pieces:
            for path in (folder, FLOOR):
                assert re.search(rf"^(def|class) {name}\b", (path / f"{step.file}.py").read_text(), re.M), (
                    path,
                    name,
                )


@pytest.mark.parametrize(
    "source",
    ["import minipar.simple.mesh as floor\ngroups = floor.groups", "from minipar.simple.mesh import groups"],
)
def test_a_piece_may_be_assigned_or_imported(source, folder):
    (folder / "mesh.py").write_text(source)
    assert fault(BY_FILE["mesh"], folder, {}) is None


@pytest.mark.parametrize("source", ["def groups((", "\0", "not " * 5000 + "1"], ids=["open", "zero", "deep"])
def test_a_file_that_cannot_be_parsed_counts_as_written(source, folder):
    (folder / "mesh.py").write_text(source)
    assert is_written(BY_FILE["mesh"], folder)
    assert fault(BY_FILE["mesh"], folder, {}).startswith("mesh.py, line 1: ")


@pytest.mark.thorough
def test_the_floors_files_solve_the_project_and_train_on_its_comm(folder):
    solve(folder, *BY_FILE)
    ok, lines = checked(folder)
    assert ok, lines
    assert all("GREEN" in line for line in lines[:10]), lines
    assert set(json.loads((folder / "project.json").read_text()).values()) == {"green"}
    done = subprocess.run(
        [sys.executable, "train.py", *["--steps", "2", "--pp", "2", "--dp", "1", "--tp", "1"]],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "yours: comm, collectives, ddp, zero" in done.stdout
    assert "the weights of one process: the largest difference is" in done.stdout


def test_a_step_that_was_green_and_breaks_is_told(folder):
    solve(folder, "mesh")
    assert checked(folder)[0]
    path = folder / "mesh.py"
    path.write_text(path.read_text().replace("if axis not in axes", "if axis in axes"))
    ok, lines = checked(folder)
    assert not ok
    assert "RED     it was green before; " in lines[7]
    assert "rank 0 is with [0, 2]; it should be with [0, 1]" in lines[7]
    path.write_text("def groups(*axes, **sizes):\n    raise NotImplementedError\n")
    assert "to write" in checked(folder)[1][7]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("comm", "x, to, async_op=True)", "x, source, async_op=True)", r"specification shift, stage (runs|small)"),
        ("collectives", "combine(chunks[mine], arrived)", "arrived", "the part of rank 0 is missing"),
        ("zero", 'padded(comm, grad), "mean")', "padded(comm, grad))", "after 1 step of SGD is exactly 2 times too large"),
        ("vocab", "* dloss / len(dz)", "* dloss", "times too large"),
        ("mesh", "def groups", "def group", "mesh.py defines no groups"),
        ("mesh", "def groups(", "def groups((", r"mesh.py, line \d+"),
        ("train", "p.grad /= num_ep", "pass", r"on --pp 1 --dp 2 .*: after 2 steps a weight is .* from one process's"),
        ("train", "p.grad /= num_ep", "{}['ep']", r"on --pp 1 --dp 2 .*: rank \d .* KeyError: 'ep' \(train.py, line \d+\)"),
    ],
)  # fmt: skip
def test_a_wrong_step_is_refused_in_words(file, old, new, says, folder):
    solve(folder, file)
    path = folder / f"{file}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    words = fault(BY_FILE[file], folder, {})
    assert words is not None
    assert re.search(says, words), words
    assert "\n" not in words


@pytest.mark.thorough
def test_training_with_a_wrong_piece_says_that_it_is_not_equal(folder):
    solve(folder, "vocab")
    path = folder / "vocab.py"
    path.write_text(
        path.read_text().replace("* dloss / len(dz)", "* dloss / len(dz) * (1 + 0.5 * comm.rank)")
    )
    path.write_text(
        path.read_text().replace("ctx.save_for_backward", "ctx.comm = comm\n        ctx.save_for_backward")
    )
    path.write_text(path.read_text().replace("0.5 * comm.rank", "0.5 * ctx.comm.rank"))
    done = subprocess.run(
        [sys.executable, "train.py", *["--steps", "2", "--pp", "1", "--dp", "1", "--tp", "2"]],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "yours: vocab; the rest is of minipar.simple" in done.stdout, done.stderr
    assert "NOT one process's weights" in done.stdout


@pytest.mark.parametrize(
    ("apart", "code", "says"),
    [(1e-12, 0, "the weights of one process"), (1e-3, 1, "NOT one process's weights")],
)
def test_a_training_says_first_whose_pieces_it_takes(apart, code, says, folder, monkeypatch):
    out = folder / "out.txt"
    before = []

    def trained(*_):
        before.append(out.read_text())  # the ranks print into the same file
        return apart

    monkeypatch.setattr(project, "distance", trained)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with out.open("w") as file, redirect_stdout(file), pytest.raises(SystemExit) as ended:
        project.main(str(folder / "train.py"))
    assert before == ["yours: nothing yet; the rest is of minipar.simple\n"]
    assert out.read_text().splitlines()[1].startswith(f"{says}: the largest difference is 1e-")
    assert ended.value.code == code


def test_a_piece_takes_the_floors_place_wherever_it_was_imported(monkeypatch):
    floors, learners = object(), object()
    names = ["minipar.simple.of_a_test", "exercise_of_a_test", "another_of_a_test"]
    modules = [ModuleType(name) for name in names]
    for module in modules:
        module.piece, module.other = floors, 3
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "exercise_not_to_be_imported", None)  # as Python allows
    project.replace(floors, learners)
    assert [module.piece for module in modules] == [learners, learners, floors]
    assert [module.other for module in modules] == [3, 3, 3]


def test_the_command_writes_a_project_and_says_what_is_next(tmp_path, capsys):
    folder = tmp_path / "my" / "framework"
    with pytest.raises(SystemExit) as ended:
        exercise_command(None)("project", str(folder))()
    assert ended.value.code == 0
    assert {path.stem for path in folder.glob("*.py")} == set(BY_FILE)
    assert "0 of 10 are green; next: " in capsys.readouterr().out


def test_a_project_needs_a_folder():
    with pytest.raises(ValueError, match="folder is missing"):
        exercise_command(None)("project")()


def test_a_step_is_no_exercise_and_the_refusal_says_what_checks_it():
    with pytest.raises(
        ValueError, match="name='collectives' is a step of a project; `minipar exercise project FOLDER`"
    ):
        find_exercise("collectives")
