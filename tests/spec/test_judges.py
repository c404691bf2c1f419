"""Judges judged: every wrong implementation of the table is called wrong, in words for its fault; unusual ones are right.

The table, tests/spec/wrong, was written from what the floor and the exercises promise, without reading the judges.
"""

import re

import pytest

from minipar.spec import SPECIFICATIONS
from tests.spec.wrong.tables import RIGHT, WORDS, WRONG

# What the words name where a fault shows in one kind of input alone. "second" and "earlier": of a fault in what is kept.
NAMED = {
    "wrong in float32": "float32",
    "wrong in bfloat16": "bfloat16",
    "ignores strides": "not contiguous|turned",
    "nan is zero": "nan|not finite",
    "wrong from five ranks on": "5 ranks",
    "backward wrong from five ranks on": "5 ranks",
    "writes to what is given": "written to",
    "writes to x": "wrote|writ|the input itself",
    "ignores the gradient from above": r"gradient|\bd[qkv]\b",
    "one buffer": "a later call",
    "stale": r"second|\[1201, 3\]",
}
CASES = [(name, fault) for name, faults in WRONG.items() for fault in faults]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("name", "fault"), CASES, ids=map(": ".join, CASES))
def test_a_wrong_implementation_is_called_wrong(name, fault):
    judge, wrong = SPECIFICATIONS[name], WRONG[name][fault]
    report = judge.check(
        wrong, ["varied"]
    )  # where most are found, and sooner than by all stages in their order
    if report.first_wrong is None:
        report = judge.check(wrong)
    assert report.first_wrong is not None, "it was called right"
    assert re.search(NAMED.get(fault, ""), report.first_wrong.words), str(report)
    assert "\n" not in report.first_wrong.words


SAID = [(name, fault) for name, faults in WORDS.items() for fault in faults]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "fault"), SAID, ids=map(": ".join, SAID))
def test_the_words_name_the_fault(name, fault):
    report = SPECIFICATIONS[name].check(WRONG[name][fault])
    assert re.search(WORDS[name][fault], str(report)), str(report)


UNUSUAL = [(name, manner) for name, manners in RIGHT.items() for manner in manners]


@pytest.mark.sampled(60)
@pytest.mark.parametrize(("name", "manner"), UNUSUAL, ids=map(": ".join, UNUSUAL))
def test_an_unusual_implementation_is_called_right(name, manner):
    report = SPECIFICATIONS[name].check(RIGHT[name][manner])
    assert report.ok, str(report)


def test_every_judge_of_the_table_has_eight_wrong_implementations():
    assert not {name: len(faults) for name, faults in WRONG.items() if len(faults) < 8}
