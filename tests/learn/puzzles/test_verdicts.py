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


HALVES = PUZZLES["halves"].answer


@pytest.mark.parametrize(
    ("puzzle", "source", "words"),
    [
        (
            "halves",
            HALVES.replace("comm.join(chunks)", "comm.join(chunks[1:])"),
            "chunk 0 is missing from the gradient that rank 0 returns at place 1",
        ),
        (
            "halves",
            HALVES.replace("return mine, whole", "return whole, mine"),
            "rank 0 returns at place 0 the gradient; it should be chunk 0 alone",
        ),
        (
            "overlap",
            PUZZLES["overlap"].answer.replace("/ comm.size", "/ 4"),
            "right on 4 ranks, but on 2: in the gradient of layer 0 that rank 0 returns, "
            "everything counts 1/4, and should count 1/2: it was divided twice, or by too large a number",
        ),
        (
            "overlap",
            PUZZLES["overlap"].answer.replace("/ comm.size", "/ 2"),
            "everything counts 1/2, and should count 1/4: it was divided by too small a number",
        ),
        (
            "naive",
            PUZZLES["naive"].answer.replace("return total", "return total * 2"),
            "everything counts 2, and should count 1: it was added more than once",
        ),
        (
            "mlp",
            PUZZLES["mlp"].answer.replace("comm.all_reduce(await", "comm.join(await"),
            "as a list; value.chunks(n) returns a list",
        ),
        (
            "ring-attention",
            PUZZLES["ring-attention"].answer.replace("    for", "    kv = await comm.all_gather(kv)\n    for"),
            "joins the keys and values of rank 1 to the keys and values of rank 0",
        ),
        (
            "mesh",
            PUZZLES["mesh"].answer.replace("[comm.rank - shard + t for t", "[t for t"),
            "rank 2 calls all_reduce with the group [0, 1]: rank 2 is not in it",
        ),
        (
            "mesh",
            PUZZLES["mesh"].answer.replace("[comm.rank - shard + t for t in range(tp)]", "[comm.rank, comm.rank]"),
            "rank 0 calls all_reduce with the group [0, 0]: a rank is in it twice",
        ),
        (
            "mesh",
            PUZZLES["mesh"].answer.replace("[comm.rank - shard + t for t in range(tp)]", "[comm.rank, 8]"),
            "with the group [0, 8]: there are ranks 0 to 7",
        ),
    ],
)  # fmt: skip
def test_a_wrong_result_or_argument_is_named_without_a_riddle(puzzle, source, words):
    found = check(PUZZLES[puzzle], source)
    assert not found.is_right
    assert words in found.text


def test_a_wait_in_a_collective_names_it_and_its_ranks():
    source = HEAD.replace("gradient", "weights, backward, step")
    source += "    if comm.rank == 0:\n        await comm.all_reduce(weights[0])\n"
    found = check(PUZZLES["zero2"], source)
    assert (
        "rank 0 waits in line 3 in all_reduce over ranks 0, 1, 2 and 3 for a message from rank 3"
        in found.text
    )


@pytest.mark.parametrize(
    ("puzzle", "source", "words"),
    [
        (
            "zero2",
            PUZZLES["zero2"].answer,
            "held by rank 0: 720 MB; best known 630 MB = all weights, and one gradient, if each layer is updated at once. "
            "These 720 MB are: weights of layers 0, 1, 2 and 3, 120 MB each; gradient of layers 0, 1, 2 and 3, 30 MB each; "
            "gradient of layer 0, 120 MB",
        ),
        (
            "1f1b",
            PUZZLES["1f1b"].answer.replace("saved.pop(m)", "saved[m]"),
            "These 1286 MB are: 8 times saved activations of stage 0, 160 MB each; weight gradient of stage 0, 4 MB; "
            "output of stage 0, 2 MB",
        ),
    ],
)
def test_what_is_held_is_listed_where_it_is_more_than_the_best_known(puzzle, source, words):
    assert str(check(PUZZLES[puzzle], source)).splitlines()[3].endswith(words)


def test_the_memory_listed_is_that_of_the_rank_in_the_verdict():
    warmup = PUZZLES["1f1b"].answer.replace("min(last - stage, count)", "min(last - stage + 1, count)")
    found = check(PUZZLES["1f1b"], warmup)
    assert "rank 0 holds" in found.text
    assert found.figures[2].name == "held by rank 0"
    assert found.figures[2].value == sum(num_bytes for _, num_bytes in found.run.world.memories[0].at_peak)
