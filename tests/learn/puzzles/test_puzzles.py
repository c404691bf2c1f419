"""Every puzzle: the known answer passes, wrong answers fail in words, and the best known figures are attained."""

import subprocess
import sys

import pytest

from minipar.learn.puzzles.registry import PUZZLES, find_puzzle
from minipar.learn.puzzles.running import compiled, run
from minipar.learn.puzzles.verdicts import check, judged
from tests.learn.puzzles.wrong_answers import WRONG_ANSWERS, source_of

EARLY_GATHERS = """\
async def program(comm, shards, x, forward, backward):
    def gather(layer):
        return comm.start(comm.all_gather(shards[layer])) if 0 <= layer < len(shards) else None

    after = gather(0)
    for layer in range(len(shards)):
        weights, after = await after, gather(layer + 1)
        x = await forward(layer, weights, x)
    gradients, dx, after = {}, x, gather(len(shards) - 2)
    for layer in reversed(range(len(shards))):
        dx, gradient = await backward(layer, weights, dx)
        gradients[layer] = comm.start(comm.reduce_scatter(gradient))
        if layer:
            weights, after = await after, gather(layer - 2)
    return [await gradients[layer] / comm.size for layer in range(len(shards))]
"""
EARLY_UPDATES = """\
async def program(comm, weights, backward, step):
    async def update(layer, gradient):
        shard = await comm.reduce_scatter(gradient) / comm.size
        weights[layer] = await comm.all_gather(step(weights[layer].chunks(comm.size)[comm.rank], shard))

    handles = []
    for layer in reversed(range(len(weights))):
        handles.append(comm.start(update(layer, await backward(layer))))
    for handle in handles:
        await handle
    return weights
"""
UPDATE_AT_ONCE = """\
async def program(comm, weights, backward, step):
    for layer in reversed(range(len(weights))):
        shard = await comm.reduce_scatter(await backward(layer)) / comm.size
        new = step(weights[layer].chunks(comm.size)[comm.rank], shard)
        del shard
        weights[layer] = await comm.all_gather(new)
        del new
    return weights
"""
# Faster, or more frugal, than the known answers.
BETTER = {
    "naive": [PUZZLES["ring"].answer],
    "zero2": [EARLY_UPDATES, UPDATE_AT_ONCE],
    "fsdp": [EARLY_GATHERS],
}


def figures(puzzle, source: str, num_ranks: int) -> dict:
    verdict = judged(run(puzzle, compiled(source), num_ranks))
    assert verdict.figures, verdict.text
    return {figure.name.split()[0]: figure for figure in verdict.figures}


def test_there_are_ten():
    assert len(PUZZLES) == 10
    assert all(
        name == puzzle.name and len(puzzle.sizes) > 1 and puzzle.hints for name, puzzle in PUZZLES.items()
    )


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=lambda puzzle: puzzle.name)
def test_the_known_answer_is_right(puzzle):
    verdict = check(puzzle, puzzle.answer)
    assert verdict.is_right, verdict.text
    assert verdict.text.startswith("right")


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=lambda puzzle: puzzle.name)
def test_the_stub_says_that_it_is_to_be_written(puzzle):
    verdict = check(puzzle, puzzle.stub)
    assert not verdict.is_right
    assert verdict.text == "this is where your program goes"
    assert "raise NotImplementedError" in puzzle.stub.splitlines()[verdict.line - 1]


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=lambda puzzle: puzzle.name)
def test_no_answer_is_better_than_the_best_known_which_one_attains(puzzle):
    for num_ranks in puzzle.sizes:
        runs = [figures(puzzle, one, num_ranks) for one in (puzzle.answer, *BETTER.get(puzzle.name, []))]
        for name, figure in runs[0].items():
            if figure.formula:
                assert min(one[name].value for one in runs) == pytest.approx(figure.best, rel=1e-9), name


@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_better_answers_pass_too(name):
    for source in BETTER[name]:
        verdict = check(PUZZLES[name], source)
        assert verdict.is_right, verdict.text


def test_each_puzzle_has_five_wrong_answers():
    counts = {name: sum(wrong.puzzle == name for wrong in WRONG_ANSWERS) for name in PUZZLES}
    assert counts == dict.fromkeys(PUZZLES, 5)


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: f"{wrong.puzzle}: {wrong.words}")
def test_a_wrong_answer_is_named_in_words(wrong):
    verdict = check(PUZZLES[wrong.puzzle], source_of(wrong))
    assert not verdict.is_right
    assert wrong.words in verdict.text


def test_an_answer_for_one_size_only_is_found_out():
    verdict = check(PUZZLES["ring"], PUZZLES["ring"].answer.replace("p, after", "p = 4; _, after"))
    assert verdict.text.startswith("right on 4 ranks, but on 5: ")


@pytest.mark.parametrize(("number", "name"), list(enumerate(PUZZLES, 1)))
def test_a_puzzle_is_found_by_its_number(number, name):
    assert find_puzzle(str(number)) is PUZZLES[name]


@pytest.mark.parametrize("number", ["0", "11", "-1"])
def test_a_number_that_no_puzzle_has_is_refused(number):
    with pytest.raises(ValueError, match="is no puzzle"):
        find_puzzle(number)


def test_an_unknown_puzzle_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean zero2"):
        find_puzzle("zero-2")


def test_puzzles_import_neither_torch_nor_numpy():
    names = "minipar.learn.puzzles.verdicts, minipar.learn.puzzles.registry"
    program = f"import sys, {names}; print(*({{'torch', 'numpy'}} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
        == []
    )
