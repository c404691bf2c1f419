"""Each exhibit's fault is found, in the words it names, and the same check is green without it."""

import re

import pytest

from minipar.museum.command import AXES
from minipar.museum.exhibit import MeshExhibit
from minipar.museum.gallery import EXHIBITS, GALLERY, find


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_fault_is_found_and_nothing_without_it(name):
    exhibit = find(name)
    finding = exhibit.run(curve=False)
    assert exhibit.says
    assert re.search(exhibit.says, finding.proof), finding.proof
    assert exhibit.run_without_fault()


def test_a_loss_curve_can_look_fine_and_be_wrong():
    exhibit = find("norm-gradients")
    losses = exhibit.run().losses
    right, wrong = losses["as it should be"], losses["with the fault"]
    assert len(right) == len(wrong) >= 30
    assert wrong[0] == pytest.approx(right[0], rel=1e-9)
    assert wrong[-1] < wrong[0]  # it learns
    assert wrong[-1] != pytest.approx(right[-1], rel=1e-9)


def test_every_symptom_has_exhibits_and_every_story_is_told():
    assert len(GALLERY) == len(EXHIBITS) >= 24
    assert len({exhibit.symptom for exhibit in GALLERY}) == 7
    for exhibit in GALLERY:
        assert exhibit.axis in AXES.replace(" or", ",").split(", ")
        assert min(map(len, (exhibit.title, exhibit.real, exhibit.story, exhibit.missed, exhibit.rule))) > 10
    assert sum(isinstance(exhibit, MeshExhibit) for exhibit in GALLERY) >= 12


def test_an_unknown_exhibit_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean tied-ends"):
        find("tied-end")
