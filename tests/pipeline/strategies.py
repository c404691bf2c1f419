"""Schedules for the property tests: every generator's, and what becomes of them when something is changed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from minipar.schedules.costs import Costs
from minipar.schedules.registry import find_schedule, make_schedule
from minipar.schedules.schedule import Schedule
from tests.schedules.families import CHOICES, LOOPED, SLICED, TWO_WAYS


def chunks(name: str):
    """Chunks per rank that a schedule can have."""
    return st.sampled_from([1, 2, 3]) if name in LOOPED else st.none()


@st.composite
def schedules(
    draw, names=(*CHOICES, *TWO_WAYS), max_ranks: int = 5, max_microbatches: int = 12, max_slices: int = 1
) -> Schedule:
    name = draw(st.sampled_from(names))
    p, m = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    if name in TWO_WAYS:
        p, m = 2 * max(1, p // 2), 2 * max(1, m // 2)
    arguments = {"slices": draw(st.integers(1, max_slices))} if name in SLICED else {}
    if "limit" in find_schedule(name).takes:  # beyond reach: any module can then run it
        arguments["limit"] = max_microbatches
    return make_schedule(name, p, m, draw(chunks(name)), **arguments)


seconds = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])


@st.composite
def costs(draw, num_stages: int) -> Costs:
    """Sums of quarters: exact in binary, so that times can be compared with ==."""
    per_stage = st.one_of(seconds, st.tuples(*[seconds] * num_stages))
    comm = draw(st.one_of(st.just(0.0), seconds))
    return Costs(draw(per_stage), draw(per_stage), draw(per_stage), comm)


@st.composite
def mutants(draw, valid=schedules(max_ranks=4, max_microbatches=6)) -> Schedule:  # noqa: B008
    """A valid schedule after one to three edits: two actions swapped, one moved, dropped or doubled."""
    schedule = draw(valid)
    ranks = [list(actions) for actions in schedule.actions]
    for _ in range(draw(st.integers(1, 3))):
        actions = ranks[draw(st.integers(0, len(ranks) - 1))]
        places = st.integers(0, max(len(actions) - 1, 0))
        i, j = draw(places), draw(places)
        edit = draw(st.sampled_from(["swap", "neighbours", "move", "drop", "double"]))
        if not actions:
            continue
        if edit == "neighbours":
            j = min(i + 1, len(actions) - 1)
        if edit in ("swap", "neighbours"):
            actions[i], actions[j] = actions[j], actions[i]
        elif edit == "double":
            actions.insert(j, actions[i])
        else:
            action = actions.pop(i)
            if edit == "move":
                actions.insert(j, action)
    return replace(schedule, actions=tuple(map(tuple, ranks)), name=f"mutant of {schedule.name}")
