"""Exercises as a learner meets them: files in a folder, checked, from the stub to green."""

import json
from pathlib import Path

import pytest

import minipar.learn.exercises
from minipar.learn.exercises import check
from minipar.learn.exercises.check import STAGES, Result, with_line
from minipar.learn.exercises.folder import PYTEST_FILE, TESTS, next_hint, start, started, state_of
from minipar.learn.exercises.registry import EXERCISES, find_exercise
from minipar.learn.exercises.solution import solution_text
from minipar.spec import SPECIFICATIONS

PACKAGE = Path(minipar.learn.exercises.__file__).parent
INDEX = PACKAGE.parents[2] / "lessons" / "exercises" / "README.md"
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)


def solved(exercise) -> str:
    """A file that imports the solution under the name that is asked for."""
    places = ((name, *place.split(":")) for name, place in exercise.solution.items())
    return "".join(f"from {module} import {own} as {name}\n" for name, module, own in places)


@pytest.mark.sampled(36)
@each
def test_the_solution_is_green_at_every_stage(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(solved(exercise))
    result = check(exercise.name, tmp_path)
    assert result.state == "green", str(result)
    assert list(result.met) == [stage.name for stage in SPECIFICATIONS[exercise.specification].stages]
    assert state_of(exercise, tmp_path) == "green"


@pytest.mark.sampled(12)
@each
def test_the_stub_is_to_do_and_says_where_its_hole_is(exercise, tmp_path):
    file = start(exercise, tmp_path)
    assert state_of(exercise, tmp_path) == "started"
    result = check(exercise.name, tmp_path)
    assert result.state == "todo", str(result)
    line = int(result.words.partition("line ")[2].partition(":")[0])
    assert file.read_text().splitlines()[line - 1].strip() == "raise NotImplementedError"
    assert state_of(exercise, tmp_path) == "todo"


@each
def test_an_exercise_is_whole(exercise):
    assert (PACKAGE / "stubs" / f"{exercise.name}.py").is_file()
    assert len(exercise.hints) == 3
    assert all(find_exercise(name) in EXERCISES[: EXERCISES.index(exercise)] for name in exercise.needs)
    for name, place in exercise.solution.items():
        own = place.partition(":")[2]
        text = solution_text(exercise)
        assert f"def {own}(" in text or f"class {own}" in text, name
    stages = [stage.name for stage in SPECIFICATIONS[exercise.specification].stages]
    assert stages == [name for name in STAGES if name in stages]
    assert stages[:3] == ["runs", "small", "drawn"]


def test_a_verdict_names_the_line_of_the_operator_that_is_wrong(tmp_path):
    exercise = find_exercise("conjugates")
    file = tmp_path / "conjugates.py"
    file.write_text("".join(f"def {name}(comm, x): ...\n" for name in exercise.solution))
    for line, name in enumerate(exercise.solution, 1):
        words = with_line(Result("", "red", words=f"the gradient through {name}"), file, exercise).words
        assert words.endswith(f"(conjugates.py, line {line})")


def test_a_deadlocks_verdict_has_a_line_for_each_rank(tmp_path):
    stuck = [
        "rank 0 waits to send 4 bytes (shift.py:2 in shift)",
        "rank 1 waits to send 4 bytes (shift.py:2 in shift)",
    ]
    red = Result("", "red", words="; ".join(stuck))
    words = with_line(red, tmp_path / "shift.py", find_exercise("shift")).words
    assert words.split("\n") == stuck


def test_there_are_at_least_24_and_the_index_lists_them():
    assert len(EXERCISES) >= 24
    rows = [line for line in INDEX.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    want = [
        f"| {n} | [{e.name}](../../minipar/learn/exercises/stubs/{e.name}.py) | {e.title} | {e.minutes} | {e.lesson} "
        f"| {', '.join(e.needs) or '-'} |"
        for n, e in enumerate(EXERCISES, 1)
    ]
    assert rows == want


def test_stubs_belong_to_an_exercise():
    names = {exercise.name for exercise in EXERCISES}
    assert {path.stem for path in (PACKAGE / "stubs").glob("*.py")} - {"__init__"} == names


def test_hints_come_one_at_a_time(tmp_path):
    exercise = find_exercise("shift")
    with pytest.raises(ValueError, match="minipar exercise start shift"):
        next_hint(exercise, tmp_path)
    start(exercise, tmp_path)
    assert [next_hint(exercise, tmp_path)[0] for _ in range(4)] == [1, 2, 3, 3]
    assert next_hint(exercise, tmp_path)[1] == exercise.hints[2]


def test_start_never_overwrites_what_was_written(tmp_path):
    file = start(find_exercise("shift"), tmp_path / "mine")
    file.write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        start(find_exercise("shift"), tmp_path / "mine")
    assert file.read_text() == "mine"
    start(find_exercise("mesh"), tmp_path / "mine")
    assert started(tmp_path / "mine") == ["shift", "mesh"]


def test_a_file_for_pytest_is_written_once(tmp_path):
    start(find_exercise("shift"), tmp_path)
    assert (tmp_path / TESTS).read_text() == PYTEST_FILE
    (tmp_path / TESTS).write_text("mine")
    start(find_exercise("mesh"), tmp_path)
    assert (tmp_path / TESTS).read_text() == "mine"


def test_a_damaged_progress_file_is_no_progress(tmp_path):
    start(find_exercise("mesh"), tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "progress.json").write_text(text, encoding="latin-1")
        assert state_of(find_exercise("mesh"), tmp_path) == "started"
    next_hint(find_exercise("mesh"), tmp_path)
    assert json.loads((tmp_path / "progress.json").read_text()) == {"mesh": {"hints": 1}}
