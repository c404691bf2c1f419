"""Experts on any number of ranks, dispatched in every way an extra brings, are the model of one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.expert.programs import check_together
from tests.expert.strategies import cases, node_sizes


@st.composite
def dispatches(draw, ep: int) -> tuple[str, dict]:
    """One of the extras' dispatches, and its options."""
    name = draw(st.sampled_from(["chunks", "shadow"]))
    node_size = draw(node_sizes(ep))
    if name == "shadow":
        return name, dict(node_size=node_size, rows=draw(st.sampled_from([0.0, 1.0, 5.0])))
    return name, dict(node_size=node_size, chunks=draw(st.integers(1, 3)))


@pytest.mark.thorough
@given(cases=st.lists(cases(dispatches, min_ranks=2), min_size=4, max_size=4), steps=st.integers(1, 3))
@examples(10)
def test_experts_on_any_ranks_are_the_model_of_one_process(cases, steps):
    check_together(cases, steps)
