"""Views of a plan, as `minipar plan --view NAME` shows them."""

import json

import pytest

from minipar.cost.plan_command import VIEWS, plan_command

JOB = dict(model="llama-7b", gpus=4, machine="h100", seq=4096, batch=8)


def test_an_automatic_split_is_a_table_of_stages():
    outcome = plan_command(**JOB, view="auto-split")
    assert "layout of the stage" in outcome.text
    assert "the planner's best, whose stages have one mesh" in outcome.text
    (best,) = outcome.layouts
    assert best.world_size == 4
    values = json.loads(plan_command(**JOB, view="auto-split", as_json=True).text)
    assert sum(stage["gpus"] for stage in values["stages"]) == 4


def test_a_view_adds_its_lines_and_its_entry_to_a_plan():
    plain, viewed = (plan_command(**JOB, view=view).text for view in ("", "compression"))
    assert viewed.startswith(plain + "\n")
    assert "compress: " in viewed.removeprefix(plain)
    plain, viewed = (json.loads(plan_command(**JOB, view=v, as_json=True).text) for v in ("", "compression"))
    assert viewed == plain | {"compress": viewed["compress"]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(view="auto-split", run=True), "leave out --explain and --run"),
        (dict(view="auto-split", explain="dp4"), "leave out --explain and --run"),
        (dict(view="auto-split", model="llama-70b", gpus=8, machine="v100"), "GB too much"),
        (dict(view="auto-split", view_options={"units": 3}), "view=auto-split has no options"),
        (dict(view="compresion"), "did you mean compression"),
        (dict(view="compression", view_options={"methods": "sign"}), "did you mean view.method"),
        (dict(view_options={"method": "sign"}), "view.method is an option of a view, and none is asked for"),
    ],
)
def test_what_a_view_cannot_answer_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        plan_command(**JOB | changes)


def test_every_view_says_what_it_is_without_its_module():
    assert {"compression", "auto-split", "unequal"} <= set(VIEWS)
    for view in VIEWS.usable().values():
        assert view.help
