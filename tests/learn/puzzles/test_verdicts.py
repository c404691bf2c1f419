"""Verdicts on programs that fail, wait or never end: in words, with the line, and by counting, never by a clock."""

import sys

import pytest

from minipar.learn.puzzles.registry import PUZZLES
from minipar.learn.puzzles.verdicts import check

HEAD = "async def program(comm, gradient):\n"


def verdict(*lines: str, puzzle: str = "naive"):
    return check(PUZZLES[puzzle], HEAD + "".join(f"    {line}\n" for line in lines))


@pytest.mark.parametrize(
    ("lines", "words", "line"),
    [
        (["return gradient +"], "Python cannot read the program: invalid syntax", 2),
        (["x = 1", "return undefined"], "on rank 0: NameError: name 'undefined' is not defined", 3),
        (["while True:", "    pass"], "rank 0 is still running after 100,000 lines: an endless loop?", None),
        (["while True:", "    await comm.compute(0)"], "more than 20,000 awaits: an endless loop?", 3),
        (["while True:", "    await comm.send(gradient, (comm.rank + 1) % 4)"], "more than 500 messages: a flood", 3),
        (["def f():", "    return f()", "return f()"], "on rank 0, a function calls itself without end", 2),
        (["await comm.compute(-1)"], "compute(-1) is not a number of seconds", 2),
        (["await comm.send(gradient, 4)"], "rank 0 sends to rank 4; there are ranks 0 to 3", 2),
        (["await comm.send(7, (comm.rank + 1) % 4)"], "send is given 7, which is not a value", 2),
        (["return gradient + comm.recv(1)"], "was not awaited: write await", 2),
        (["comm.recv(1)", "return gradient"], "rank 0 never awaits comm.recv", 2),
        (["return await comm.all_reduce(gradient)"], "comm.all_reduce is what this puzzle asks you to write", 2),
        (["import asyncio", "await asyncio.sleep(0)"], "awaits something that is not of comm", None),
        (["pass"], "rank 0 returns nothing; it should return the gradient", None),
        (
            ["if comm.rank == 2:", "    await comm.recv(1)"],
            "after 0 ms nothing moves: rank 2 waits in line 3 for a message from rank 1, which has ended",
            3,
        ),
        (
            ["if comm.rank == 2:", "    handle = comm.start(comm.recv(1))", "    await handle"],
            "rank 2 waits in line 3 for a message from rank 1",
            3,
        ),
    ],
)  # fmt: skip
def test_what_stops_a_program_is_named_with_its_line(lines, words, line):
    found = verdict(*lines)
    assert not found.is_right
    assert words in found.text
    assert found.line == line or line is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "there is no function called program"),
        ("def program(comm, gradient):\n    return gradient\n", "program is not asynchronous"),
        ("async def program(comm):\n    pass\n", "begin with `async def program(comm, gradient):`"),
        ("while True:\n    pass\n", "an endless loop?"),
        ("import nowhere_to_be_found\n", "ModuleNotFoundError"),
        ("program = 3\n\0", "Python cannot read the program"),
    ],
)
def test_a_source_without_a_program_is_named(source, words):
    assert words in check(PUZZLES["naive"], source).text


def test_a_value_smuggled_past_the_network_is_found():
    source = (
        "import sys\n"
        + HEAD
        + "    mine = sys.__dict__.setdefault('smuggled', gradient)\n    return mine + gradient\n"
    )
    try:
        found = check(PUZZLES["naive"], source)
    finally:
        vars(sys).pop("smuggled", None)
    assert (
        "uses a value of rank 1 on rank 0" in found.text or "uses a value of rank 0 on rank 1" in found.text
    )


def test_ranks_have_globals_of_their_own():
    source = "seen = []\n" + HEAD + "    seen.append(comm.rank)\n    await comm.compute(1)\n    print(seen)\n"
    found = check(PUZZLES["naive"], source)
    assert found.run.printed == [f"rank {rank}, line 5: [{rank}]" for rank in range(4)]


def test_a_deadlock_names_the_circle_of_ranks():
    found = verdict("await comm.recv((comm.rank + 1) % comm.size)")
    said = [f"rank {rank} waits in line 2 for a message from rank {(rank + 1) % 4}" for rank in range(4)]
    assert found.text == "deadlock, after 0 ms nothing moves: " + "; ".join(said)


def test_a_tracer_that_was_there_before_is_there_again():
    def tracer(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        check(PUZZLES["naive"], PUZZLES["naive"].stub)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_a_right_program_has_its_figures_beside_the_best_known():
    text = str(check(PUZZLES["naive"], PUZZLES["naive"].answer))
    assert text.splitlines()[0] == "right; the best known sends less and is faster"
    assert "sent by the busiest rank: 360 MB; best known 180 MB" in text
