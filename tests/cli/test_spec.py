"""`minipar spec`: lists, says what is asked, and judges anybody's file or module; 1 is red, 2 a bad request."""

import re

import pytest
import torch

from minipar.cli import main
from minipar.learn.exercises.registry import EXERCISES
from minipar.spec import SPECIFICATIONS, check

TWO = """
def all_reduce(comm, x):
    return comm.all_reduce(x, algorithm="ring")

def alone(comm, x):
    return x.clone()

from minipar.spec import conventions
tree = conventions("any tree")(all_reduce)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TWO)
    return "mine.py"


def test_every_specification_is_listed_with_its_signature(capsys):
    main(["spec"])
    out = capsys.readouterr().out
    assert all(f"\n{one.name} " in f"\n{out}" and one.signature in out for one in SPECIFICATIONS.values())


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_what_is_asked_is_said_stage_by_stage(name, capsys):
    main(["spec", name])
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {stage.name} .*\(.+\)$", out, re.M) for stage in SPECIFICATIONS[name].stages)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["mine.py"], 0, "all_reduce: right, in all 6 stages"),
        (["mine.py:alone"], 1, "small: on 2 ranks: rank 0: chunk 0: the part of rank 1 is missing"),
        (["mine:alone", "--stages", "runs"], 0, "right, in all 1 stages"),
        (["mine:alone", "--stages", "drawn", "--ranks", "3"], 1, "drawn: on 3 ranks"),
        (["minipar.simple.collectives", "--stages", "drawn", "--ranks", "2"], 0, "right"),
    ],
)
def test_a_file_or_a_module_is_judged(argv, code, says, file, capsys):
    with pytest.raises(SystemExit) as left:
        main(["spec", "all_reduce", *argv])
    assert left.value.code == code
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["all_redcue"], "name='all_redcue' is no specification; did you mean all_reduce?"),
        (
            ["all_gather", "mine.py"],
            "mine.py defines no all_gather, of all_gather(comm, chunk); mine.py:NAME names another",
        ),
        (["all_reduce", "absent.py"], "implementation=absent.py cannot be read"),
        (["all_reduce", "absent.module"], "implementation='absent.module' is no file.py, and no module"),
        (
            ["all_reduce", "mine.py", "--stages", "memory"],
            "stages='memory': all_reduce has runs, small, drawn",
        ),
        (["all_reduce", "mine.py", "--ranks", "0"], "ranks=0: use 1 or more"),
        (["mesh", "mine.py:alone", "--ranks", "2"], "mesh is checked on one rank"),
        (
            ["all_reduce", "mine.py:alone", "--backend", "mpi"],
            "invalid choice 'mpi' for argument '--backend'",
        ),
        pytest.param(
            ["all_reduce", "mine.py:alone", "--backend", "nccl"],
            "backend='nccl' needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (
            ["all_reduce", "mine.py:tree"],
            "conventions='any tree' is unknown to all_reduce, which knows two ranks",
        ),
    ],
)
def test_a_bad_request_is_one_line_and_exit_2(argv, says, file, capsys):
    with pytest.raises(SystemExit) as left:
        main(["spec", *argv])
    err = capsys.readouterr().err
    assert (left.value.code, err.count("\n")) == (2, 1)
    assert says in err


def test_a_signature_names_what_an_exercise_defines():
    for exercise in EXERCISES:
        if exercise.specification.startswith("schedule_"):
            continue  # called by the schedule's own name
        assert set(SPECIFICATIONS[exercise.specification].defines) == set(exercise.solution), exercise.name


def test_python_has_the_same_door():
    assert check("shift", "minipar.simple.ring_attention:pass_on", stages=["small"]).ok
