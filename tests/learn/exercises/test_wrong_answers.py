"""Each classic wrong answer, in a learner's file, is red at the stage where it is best understood, with words for it."""

import os
import re

import pytest

from minipar.learn.exercises.registry import EXERCISES, find_exercise
from minipar.spec import SPECIFICATIONS
from minipar.spec.from_file import FromFile
from tests.learn.exercises.wrong_answers import WRONG_ANSWERS, source_of
from tests.spec.test_specifications import WRONG
from tests.spec.wrong.tables import RIGHT
from tests.spec.wrong.tables import WRONG as TABLE


def title(wrong) -> str:
    return f"{wrong.exercise}-{WRONG_ANSWERS.index(wrong)}"


@pytest.mark.sampled(16)
@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=title)
def test_a_classic_wrong_answer_is_red_where_it_is_best_understood(wrong, tmp_path):
    exercise = find_exercise(wrong.exercise)
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(source_of(wrong))
    report = SPECIFICATIONS[exercise.specification].check(FromFile(str(file), tuple(exercise.solution)))
    assert not report.ok
    assert report.first_wrong.stage == wrong.stage, str(report)
    if os.environ.get("MINIPAR_TRANSPORT") != "grouped":  # which says it in other words
        assert re.search(wrong.words, report.first_wrong.words), str(report)
    assert "Traceback" not in report.first_wrong.words
    assert "\n" not in report.first_wrong.words


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_every_exercise_has_eight_wrong_answers(exercise):
    """Every table that is run counts: here, the usual mistakes, and the judges' own."""
    tables = (
        [wrong.exercise for wrong in WRONG_ANSWERS].count(exercise.name),
        [name for name, *_ in WRONG].count(exercise.specification),
        len(TABLE.get(exercise.specification, ())),
    )
    assert sum(tables) >= 8, tables
    if exercise.specification in TABLE:  # those of a contributor may all be mistakes in a file
        assert len(TABLE[exercise.specification]) >= 8
        assert len(RIGHT[exercise.specification]) >= 1
