"""Each exhibit's fault is found, in the words it names, and the same check is green without it."""

import re
from types import SimpleNamespace

import pytest
import torch

from minipar.learn.museum import mesh_faults
from minipar.learn.museum.command import AXES
from minipar.learn.museum.exhibit import MeshExhibit
from minipar.learn.museum.gallery import EXHIBITS, GALLERY, SYMPTOMS, _exhibits, exhibit_of, find
from minipar.support import registry
from minipar.train import step


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", EXHIBITS)
def test_the_fault_is_found_and_nothing_without_it(name):
    exhibit = find(name)
    finding = exhibit.run(curve=False)
    assert exhibit.says
    assert re.search(exhibit.says, finding.proof), finding.proof
    assert exhibit.run_without_fault()


def test_averaging_experts_over_replicas_scales_gradients_by_ep(monkeypatch):
    """Planted fault: dividing by ep once more would make them too small, which no framework did."""
    expert, router = (torch.ones(3, requires_grad=True) for _ in range(2))
    names = {expert: "layers.1.mlp.experts.up", router: "layers.1.mlp.router"}
    for x in names:
        x.grad = torch.ones(3)
    state = SimpleNamespace(
        optimizer=SimpleNamespace(tensors=list(names)), mesh=SimpleNamespace(sizes={"dp": 8, "ep": 4})
    )
    monkeypatch.setattr(mesh_faults, "placement_of", lambda x: SimpleNamespace(name=names[x]))
    monkeypatch.setattr(step, "gradients", lambda world, state: torch.tensor(0.0))
    mesh_faults.experts_averaged_over_replicas(None, monkeypatch.setattr)
    step.gradients(None, state)
    assert (expert.grad / router.grad).tolist() == [4.0] * 3


@pytest.mark.thorough
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
    assert {exhibit.symptom for exhibit in GALLERY} == set(SYMPTOMS)
    for exhibit in GALLERY:
        assert exhibit.axis in AXES.replace(" or", ",").split(", "), exhibit.name
        assert min(map(len, (exhibit.title, exhibit.real, exhibit.story, exhibit.missed, exhibit.rule))) > 10
    assert sum(isinstance(exhibit, MeshExhibit) for exhibit in GALLERY) >= 12


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"fault": "times_microbatch"}, "cannot be made: .* no attribute 'times_microbatch'"),
        ({"rule": None}, "cannot be made: .*missing .*'rule'"),
        ({"symptom": "hangs"}, "has symptom='hangs'; use fine and wrong, .* or slow or large"),
        ({"config": None}, "has not exactly one of config, serving, specification, drawing"),
        ({"config": {"dp": 0}}, "cannot be made: dp=0"),
    ],
)
def test_a_row_with_a_mistake_is_refused_with_its_name(mistake, words):
    row = dict(
        name="mine", title="A title", symptom="hang", axis="dp", real="code", story="A story", missed="Why",
        rule="A rule", says="words", fault="microbatches_not_divided", config={"dp": 2},
    )  # fmt: skip
    assert exhibit_of(row).name == "mine"
    told = {field: value for field, value in (row | mistake).items() if value is not None}
    with pytest.raises(ValueError, match=f"^exhibit='mine' of gallery.toml {words}"):
        exhibit_of(told)


def test_an_unknown_exhibit_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean tied-ends"):
        find("tied-end")


def test_without_its_extra_an_exhibit_is_left_out(monkeypatch):
    monkeypatch.setattr(registry, "_installed", dict)
    of_extras = {"norms-of-one-square", "slices-detached"}
    assert {exhibit.name for exhibit in _exhibits()} == set(EXHIBITS) - of_extras
