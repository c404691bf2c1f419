"""Problems on paper: three for each lesson, answered in two ways, and what is commonly written instead is refused."""

import itertools
import re
from math import ceil, log2, sqrt
from pathlib import Path
from random import Random

import pytest

from minipar.learn.exercises.cards import judged, page, titles_of, worked_lines
from minipar.learn.exercises.problems import LESSONS, PROBLEMS
from tests.learn.exercises.another_way import ANOTHER_WAY

LESSON_FILES = Path(__file__).parents[3] / "lessons"
BY_NAME = {problem.name: problem for problem in PROBLEMS}
ARITHMETIC = {"ceil": ceil, "log2": log2, "sqrt": sqrt, "max": max}
MISTAKES = {  # what people answer, from the right answer and the numbers
    "gain_of_one_bucket": lambda right, tensors, **_: tensors,
    "sum_on_one_rank": lambda right, p, **_: right / 2,  # only the way in
    "ring_of_half_latency": lambda right, p, **_: right / p,  # that of one message
    "all_reduce_over_nodes": lambda right, gigabytes, outside, **_: 2 * gigabytes / outside * 1e3,
    "bus_bandwidth": lambda right, gigabytes, milliseconds, **_: gigabytes / milliseconds * 1e3,
    "largest_data_parallel_size": lambda right, **_: (right - 1) / 2,  # without the all-gather's half
    "memory_of_a_model": lambda right, p, zero, **_: right * p if zero else right / p,
    "bytes_of_zero3": lambda right, microbatches, **_: right * 3 * microbatches / (2 * microbatches + 1) * 1.1,
    "bytes_of_tensor_parallelism": lambda right, **_: right / 2,  # two all-reduces
    "activations_of_80_layers": lambda right, p, **_: right / (2 * p),  # divided by the stages
    "what_sequence_parallelism_saves": lambda right, t, **_: right / (t - 1),  # what is left
    "microbatches_for_a_bubble": lambda right, **_: right - 1,
    "activations_under_1f1b": lambda right, p, rank, **_: right * (rank + 32) / (p - rank),  # as GPipe
    "idle_time_of_zb_h1": lambda right, p, forward, input_gradient, weight_gradient: (
        (p - 1) * (forward + input_gradient + weight_gradient) / 3  # "exactly a third"
    ),
    "dropped_tokens": lambda right, **_: right + 1,
    "gain_of_zigzag": lambda right, p, **_: p,
    "bytes_of_ulysses": lambda right, p, **_: right * p,  # as if it did not fall with P
    "rank_at_a_place": lambda right, **_: right + 1,
    "checkpoint_interval": lambda right, **_: right * sqrt(2),
    "days_of_a_training": lambda right, **_: right / 3,  # 2 P a token
    "utilization": lambda right, **_: right * 8 / 6,  # with recomputation: HFU
    "states_on_a_mesh": lambda right, billions, tp, pp, dp: 16 * billions / (tp * pp * dp),  # ZeRO-3
    "bubble_of_a_mesh": lambda right, **_: 100 * right / (100 - right) * 1.2,  # over the ideal time, and more
    "cache_of_a_request": lambda right, **_: right / 2,  # keys alone
    "idle_places_of_a_static_batch": lambda right, **_: 100 - right * 1.1,
    "gain_of_mending_a_straggler": lambda right, p, slower, **_: 1 + (slower - 1) / p,  # the mean of ranks
    "time_saved_by_smaller_microbatches": lambda right, pieces, **_: right * pieces / (pieces - 1),  # all of it
}  # fmt: skip


def draws(problem):
    """Every combination of the numbers if they are few, else some."""
    every = itertools.product(*problem.values.values())
    if len(few := list(itertools.islice(every, 25))) < 25:
        return [dict(zip(problem.values, numbers)) for numbers in few]
    return [problem.draw(Random(seed)) for seed in range(25)]


def test_each_lesson_has_three_problems_with_names_of_their_own():
    files = sorted(path.name[:2] for path in LESSON_FILES.glob("[0-9][0-9]_*.ipynb"))
    assert [problem.lesson for problem in PROBLEMS] == [number for number in files for _ in range(3)]
    assert list(LESSONS) == files
    assert len(BY_NAME) == len(PROBLEMS)
    assert ANOTHER_WAY.keys() == BY_NAME.keys()
    assert MISTAKES.keys() <= BY_NAME.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_NAME)
def test_the_answer_is_also_found_another_way(name):
    problem = BY_NAME[name]
    for numbers in draws(problem):
        card = problem.of(**numbers)
        found = ANOTHER_WAY[name](**numbers)
        # A searched answer is as exact as the steps of its search.
        assert found == pytest.approx(card.answer, rel=3e-3 if card.within else 1e-12), numbers


@pytest.mark.parametrize("name", BY_NAME)
def test_the_worked_lines_end_in_the_answer(name):
    problem = BY_NAME[name]
    for numbers in draws(problem):
        card = problem.of(**numbers)
        assert 2 <= len(card.worked) <= 5
        assert eval(card.worked[-1], dict(ARITHMETIC)) == pytest.approx(card.answer, rel=1e-4), numbers
        assert worked_lines(card)[-1].endswith(f" = {card.answer:.4g} {card.unit}")
        assert judged(card, f"{card.answer:.4g}"), "what is shown as the answer would be refused"


@pytest.mark.parametrize("name", BY_NAME)
def test_the_question_states_its_numbers(name):
    problem = BY_NAME[name]
    for numbers in draws(problem):
        question = problem.of(**numbers).question
        stated = [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", question)]
        for key, value in numbers.items():
            values = [v for v in value if not isinstance(v, str)] if isinstance(value, tuple) else [value]
            if (name, key) not in SAID_OTHERWISE:
                assert all(v in stated for v in values), (key, question)


SAID_OTHERWISE = {  # in words, or as a number that follows from it
    ("memory_of_a_model", "zero"),
    ("smallest_product_bound_by_arithmetic", "machine"),
    ("utilization", "model"),
    ("utilization", "percent"),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_answer_is_refused_and_a_rounded_one_is_not(name):
    problem = BY_NAME[name]
    for numbers in draws(problem):
        card = problem.of(**numbers)
        assert 0 <= card.within <= 0.03
        assert judged(card, repr(card.answer * (1 + card.within * 0.9))) is True
        wrong = [card.answer * factor for factor in (0.5, 0.9, 1.1, 2, 8, 1000)] if card.answer else [1]
        for answer in (*wrong, -card.answer - 1):
            assert judged(card, repr(answer)) is False, (numbers, answer)
        if name in MISTAKES:
            assert judged(card, repr(MISTAKES[name](card.answer, **numbers))) is False, numbers


def test_the_page_is_that_of_the_problems():
    written = (LESSON_FILES / "problems.md").read_text()
    assert written == page(titles_of(LESSON_FILES)), (
        "run: python -m minipar.learn.exercises.cards lessons/problems.md"
    )
    assert written.count("<summary>") == len(PROBLEMS)
    links = re.findall(r"^## \[.*\]\((.*)\)$", written, re.M)
    assert len(links) == len(LESSONS)
    assert all((LESSON_FILES / link).exists() for link in links)
