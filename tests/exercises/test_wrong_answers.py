"""Each classic wrong answer, in a learner's file, is red at the stage where it is best understood, with words for it."""

import os
import re
from collections import Counter

import pytest

from minipar.exercises import EXERCISES, find_exercise
from minipar.spec import SPECIFICATIONS
from minipar.spec.from_file import FromFile
from tests.exercises.wrong_answers import WRONG_ANSWERS, source_of
from tests.spec.test_specifications import WRONG


def title(wrong) -> str:
    return f"{wrong.exercise}-{WRONG_ANSWERS.index(wrong)}"


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
def test_every_exercise_has_five_wrong_answers(exercise):
    known = Counter(wrong.exercise for wrong in WRONG_ANSWERS)[exercise.name]
    known += Counter(name for name, *_ in WRONG)[exercise.specification]
    assert known >= 5
