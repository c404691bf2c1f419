"""What the interactive pages are answered: the library's own numbers, and its words where it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.cost.plan_command import plan_command
from minipar.schedules import Action, Schedule, make_schedule, simulate
from tests.pipeline.strategies import schedules
from tests.schedules.families import CHOICES, TWO_WAYS
from website.answers import answer


def asked(name: str, **request) -> dict:
    return json.loads(answer(name, json.dumps(request)))


NAMED = [
    name for name in (*CHOICES, *TWO_WAYS) if name != "offloaded"
]  # its name is that of its order, and of its limit


@given(schedules(NAMED, max_ranks=5, max_microbatches=9, max_slices=3))
def test_a_timeline_is_the_simulators(want):
    p, m, v = (
        want.num_ranks,
        want.num_microbatches,
        want.num_stages // want.num_ranks // (1 + (want.name in TWO_WAYS)),
    )
    got = asked("pipeline", schedule=want.name, p=p, m=m, v=v, slices=getattr(want, "slices", 1))
    assert got["slices"] == getattr(want, "slices", 1)
    assert ("no_csv" in got) == (got["csv"] is None) == (type(want) is not Schedule)
    assert [[tuple(action[:3]) for action in own] for own in got["ranks"]] == [
        list(own) for own in want.actions
    ]
    assert got["peak_live"] == list(simulate(want).peak_live)
    assert got["bubble_over_total"] == pytest.approx(simulate(want).bubble_over_total, abs=1e-12)


@given(schedules(["1f1b", "seq1f1b", "chimera"], max_ranks=4, max_microbatches=6, max_slices=3), st.data())
def test_an_action_names_what_it_needs_and_who_waits_for_it(schedule, data):
    chosen = data.draw(st.sampled_from([a for own in schedule.actions for a in own]))
    p, m, slices = schedule.num_ranks, schedule.num_microbatches, getattr(schedule, "slices", 1)
    got = asked("action", schedule=schedule.name, p=p, m=m, slices=slices, action=list(chosen))
    assert {tuple(a) for a in got["needs"]} == set(schedule.needs(chosen))
    for waiting in got["waiting"]:
        assert chosen in schedule.needs(Action(*waiting))


def test_a_valid_custom_order_runs_and_deadlocks_show_a_cycle():
    orders = [[list(a) for a in own] for own in make_schedule("gpipe", 2, 2).actions]
    assert asked("pipeline", schedule="gpipe", p=2, m=2, orders=orders)["name"] == "yours"
    ours = [[list(a) for a in own] for own in make_schedule("chimera", 2, 2).actions]
    assert asked("pipeline", schedule="chimera", p=2, m=2, orders=ours)["name"] == "yours"
    orders[0] = [["F", 0, 0], ["B", 0, 0], ["F", 0, 1], ["B", 0, 1]]
    got = asked("pipeline", schedule="gpipe", p=2, m=2, orders=orders)
    assert "deadlocks" in got["error"]
    assert sorted(got["cycle"]) == [0, 1]


@pytest.mark.thorough
def test_the_plan_is_that_of_the_command():
    job = dict(model="llama-7b", gpus=16, machine="h100", seq=4096, batch=64)
    want = json.loads(plan_command(**job, as_json=True).text)
    got = asked("plan", **job)
    forms = [best.pop("form") for best in got["best"]]
    assert {name: got[name] for name in want} == want
    for form, best in zip(forms, got["best"], strict=True):
        sizes = [f"{axis}{form[axis]}" for axis in ("dp", "pp", "tp", "cp", "ep") if form[axis] > 1]
        assert set(sizes) <= set(best["layout"].split("-"))
        assert f"zero{form['zero']}" in best["layout"] or form["zero"] == 0


def test_one_layout_is_that_of_the_command():
    want = json.loads(
        plan_command("llama-70b", 64, "a100-80gb", 4096, 1024, explain="dp4-pp2-tp8-zero1", as_json=True).text
    )
    got = asked("layout", dp=4, pp=2, tp=8, zero=1)
    assert {name: got[name] for name in want} == want


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "request_", "words"), [
    ("pipeline", {"p": 0}, "p=0; use 1 to 64"),
    ("pipeline", {"m": 10**6}, "m=1000000; use 1 to 1024"),
    ("pipeline", {"p": "four"}, "p='four' is not a whole number"),
    ("pipeline", {"p": 64, "m": 1024}, "make 196,608 actions; use 60,000 or fewer"),
    ("pipeline", {"schedule": "seq1f1b", "p": 16, "m": 64, "slices": 64}, "64 slices make 196,608 actions; use 60,000"),
    ("pipeline", {"schedule": "chimera", "p": 3}, "use an even number, such as 4"),
    ("pipeline", {"schedule": "1f1"}, "did you mean 1f1b"),
    ("pipeline", {"F": "x"}, "F='x' is no number"),
    ("pipeline", {"F": "nan"}, "F=nan is no number"),
    ("pipeline", {"F": "1 2"}, "F has 2 entries for 4 stages"),
    ("plan", {"model": "lama-7b"}, "did you mean llama-7b"),
    ("plan", {"model": "llama3-405b", "gpus": 8}, "does not fit"),
    ("layout", {"dp": 3}, "is not legal"),
    ("layout", {"zero": 4}, "zero=4; use 0 to 3"),
    ("mesh", {"dp": 2, "rank": 2}, "rank=2 is not in a world of 2"),
    ("mesh", {"dp": 10**9}, "use 4,096 or fewer"),
    ("curves", {"gb_per_s": 0}, "gb_per_s=0"),
    ("mess", {}, "did you mean mesh"),
])  # fmt: skip
def test_what_cannot_be_is_said(name, request_, words):
    got = asked(name, **request_)
    assert list(got) == ["error"]
    assert words in got["error"]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.data())
def test_a_ranks_groups_hold_it_and_what_leaves_the_node_spans_two(pp, dp, tp, node, data):
    world = pp * dp * tp
    rank = data.draw(st.integers(0, world - 1))
    got = asked("mesh", pp=pp, dp=dp, tp=tp, rank=rank, ranks_per_node=node)
    assert all(rank in group for group in got["groups"].values())
    for axis, group in got["groups"].items():
        if not got["leaves_the_node"].get(axis, True):
            assert len({r // node for r in group}) == 1


def test_a_ring_wins_for_large_messages_and_a_tree_for_small_ones():
    got = asked("curves", p=6)
    assert len(got["crossovers"]) == 1
    _, small, large = got["crossovers"][0]
    assert (small, large) == ("tree: reduce, then broadcast", "ring")


def test_the_answers_need_neither_torch_nor_numpy():
    code = "import sys, website.answers; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
