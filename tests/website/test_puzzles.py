"""What the puzzles' page shows: the verdict of `minipar puzzle`, and a picture of every message and computation."""

from __future__ import annotations

import json

import pytest

from minipar.learn.puzzles.registry import PUZZLES
from minipar.learn.puzzles.verdicts import check
from website.answers import answer
from website.puzzles import sections


def asked(name: str, program: str) -> dict:
    return json.loads(answer("puzzle", json.dumps({"puzzle": name, "program": program})))


def test_a_right_program_has_figures_and_a_picture():
    got = asked("overlap", PUZZLES["overlap"].answer)
    assert (got["right"], got["line"]) == (True, None)
    assert [line.split(":")[0].split()[0] for line in got["figures"]] == ["sent", "time", "held"]
    picture = got["picture"]
    assert picture["names"] == [name for rank in range(4) for name in (f"rank {rank}", "sends")]
    assert [len(own) for own in picture["ranks"][:2]] == [4, 4 * 2 * 3]  # layers; messages of as many rings
    ends = [bar[4] for own in picture["ranks"] for bar in own]
    assert max(ends) == pytest.approx(
        check(PUZZLES["overlap"], PUZZLES["overlap"].answer).run.world.now_s * 1e3
    )


def test_without_computing_there_is_a_row_for_each_rank_alone():
    picture = asked("ring", PUZZLES["ring"].answer)["picture"]
    assert picture["names"] == [f"rank {rank}" for rank in range(4)]
    assert {bar[0] for own in picture["ranks"] for bar in own} == {"S"}


def test_a_wrong_program_has_its_line_and_what_it_printed():
    got = asked("naive", "async def program(comm, gradient):\n    print(comm.rank)\n    oops\n")
    assert not got["right"]
    assert got["line"] == 3
    assert got["printed"] == ["rank 0, line 2: 0"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"puzzle": "rin", "program": ""}, "did you mean ring"),
        ({"puzzle": "ring", "program": "x" * 60_000}, "use 50,000"),
    ],
)
def test_an_impossible_request_is_an_error_in_words(request_, words):
    assert words in json.loads(answer("puzzle", json.dumps(request_)))["error"]


def test_the_page_has_every_task_stub_hint_and_answer():
    text = sections()
    for puzzle in PUZZLES.values():
        assert puzzle.task.strip() in text
        assert puzzle.stub in text
        assert puzzle.conditions in text
        assert all(hint in text for hint in puzzle.hints)
        assert puzzle.answer.splitlines()[-1].strip() in text
