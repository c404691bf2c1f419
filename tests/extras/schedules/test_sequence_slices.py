"""Seq1F1B: idle time, memory and order as its docstring says; and the best cut of a sample."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.schedules.sequence_slices import SlicedSchedule, seq1f1b, slice_tokens
from minipar.schedules import (
    Action,
    Costs,
    Deadlock,
    one_f_one_b,
    simulate,
    validate,
)
from tests.pipeline.strategies import seconds

ranks, microbatches, pieces = st.integers(1, 6), st.integers(1, 8), st.integers(1, 5)


@given(ranks, microbatches, pieces, seconds, seconds, seconds)
def test_slices_divide_the_bubble_and_the_memory(p, m, s, f, i, w):
    """MindSpeed's documentation prints (p-1)(F+B)/s and (s+p-1)/s M, M being what a microbatch's activations take.

    Its authors print (P-1+k)/k M for k slices, too, but (P-1) M for 1F1B (issue 4 of thunlp/Seq1F1B): that counts the
    warm-up alone, where the same rule gives P.
    """
    timeline = simulate(seq1f1b(p, m, s), Costs(f, i, w))
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (m * s))
    assert timeline.makespan == (m * s + p - 1) * (f + i + w)
    assert timeline.peak_live == tuple(min(p - r + s - 1, m * s) for r in range(p))


@given(ranks, microbatches)
def test_one_slice_makes_1f1b(p, m):
    assert seq1f1b(p, m, 1).actions == one_f_one_b(p, m).actions


def test_seq1f1b_on_2_ranks_is_the_published_picture():
    """Microbatches 0 and 1 of two slices each: the later slice's backward first."""
    schedule = seq1f1b(2, 2, 2)
    rows = [" ".join(a.op + schedule.label(a.microbatch) for a in own) for own in schedule.actions]
    assert rows == ["F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0", "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0"]


@pytest.mark.parametrize("op", "FB")
def test_slices_in_the_other_order_are_refused(op):
    """A forward before the earlier slice's lacks keys and values; a backward before the later slice's, their gradients."""
    order = {"F": (0, 1, 2), "B": (2, 1, 0)}
    order[op] = order[op][::-1]
    actions = tuple(tuple(Action(op, rank, k) for op in "FB" for k in order[op]) for rank in range(2))
    wrong = SlicedSchedule(actions, (0, 1), 1, "in another order", 3)
    with pytest.raises(Deadlock, match=rf"rank 1 cannot run {op} .* before {op} .*; cycle: rank"):
        validate(wrong)
    validate(replace(wrong, slices=1, num_microbatches=3))  # as microbatches they would be


# Where to cut a sample ---------------------------------------------------------------------------------------------


def every_cut(seq_len: int, slices: int, multiple: int):
    places = range(multiple, seq_len, multiple)
    for inner in combinations(places, slices - 1):
        ends = (0, *inner, seq_len)
        yield tuple(b - a for a, b in zip(ends, ends[1:]))


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=12),
    seconds,
)
def test_the_cut_is_the_best_of_all(seq_len, slices, multiple, of_tokens, of_keys):
    def cost(before, tokens):
        return sum(of_tokens[before : before + tokens]) + of_keys * tokens * (before + tokens)

    def largest(sizes):
        return max(cost(sum(sizes[:n]), size) for n, size in enumerate(sizes))

    parts = -(-seq_len // multiple)
    if slices > parts:
        with pytest.raises(
            ValueError, match=rf"slices={slices} are more than seq_len={seq_len} .* use {parts} or"
        ):
            slice_tokens(seq_len, slices, cost, multiple)
        return
    cuts = list(every_cut(seq_len, slices, multiple))
    assert slice_tokens(seq_len, slices, cost, multiple) == min(
        cuts, key=lambda sizes: (largest(sizes), sizes)
    )


def test_causal_attention_makes_later_slices_shorter():
    sizes = slice_tokens(64, 4, lambda before, tokens: tokens * (8 + before + (tokens + 1) / 2))
    assert sum(sizes) == 64
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]
    assert slice_tokens(64, 4, lambda before, tokens: float(tokens)) == (16, 16, 16, 16)


def test_a_slice_also_needs_its_neighbour_on_the_same_stage():
    """Units 6, 7 and 8 are the slices of microbatch 2, on 4 stages."""
    needs = seq1f1b(4, 3, 3).needs
    assert needs(Action("F", 0, 6)) == ()
    assert needs(Action("F", 0, 7)) == (Action("F", 0, 6),)
    assert needs(Action("F", 2, 8)) == (Action("F", 1, 8), Action("F", 2, 7))
    assert needs(Action("B", 3, 8)) == (Action("F", 3, 8),)
    assert needs(Action("B", 3, 7)) == (Action("F", 3, 7), Action("B", 3, 8))
    assert needs(Action("I", 2, 6)) == (Action("F", 2, 6), Action("I", 3, 6), Action("I", 2, 7))
    assert needs(Action("W", 2, 7)) == (Action("I", 2, 7),)
