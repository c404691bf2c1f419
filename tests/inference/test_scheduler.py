"""Policies and steps without a model: every text goes on with token 0, a step takes a second."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.inference.blocks import BlockPool
from minipar.inference.policy import FirstCome, MultiLevelFeedback, ShortestRemaining
from minipar.inference.request import Request
from minipar.inference.scheduler import Plan, Scheduler, Sequence


def run(scheduler, requests):
    """When each request is finished, and each step's plan as {number: tokens read}."""
    coming = sorted(enumerate(requests), key=lambda item: item[1].arrival_s)
    now, finished, steps = 0, {}, []
    while coming or scheduler.sequences:
        while coming and coming[0][1].arrival_s <= now:
            scheduler.add(Sequence.of(*coming.pop(0)))
        plan = scheduler.plan() if scheduler.sequences else Plan()
        now += 1
        steps.append({read.sequence.number: read.count for read in plan.reads})
        for read in plan.reads:
            text = read.sequence.text
            written = [0] if read.writes else []
            text += written
            scheduler.advance(read.sequence, read.count)
            if written and read.sequence.request.is_finished_by(text):
                finished[read.sequence.number] = now
                scheduler.remove(read.sequence)
    return [finished[i] for i in range(len(requests))], steps


def one_at_a_time(policy):
    return Scheduler(BlockPool(100, 4), policy, token_budget=1, max_running=1)


def jobs(*arrival_and_length):
    """Requests that take `length` steps of one token."""
    return [Request((1,), length, arrival_s=arrival) for arrival, length in arrival_and_length]


TRACE = jobs((0, 5), (1, 2), (2, 1), (3, 4))


@pytest.mark.parametrize(
    ("policy", "finished"),
    [
        (FirstCome(), [5, 7, 8, 12]),
        (ShortestRemaining(), [8, 3, 4, 12]),
        (MultiLevelFeedback(quantum=2), [10, 4, 5, 12]),
    ],
)
def test_a_trace_made_by_hand(policy, finished):
    assert run(one_at_a_time(policy), TRACE)[0] == finished


@cache
def least_total(now, left, arrivals):
    """The least sum of completion times over every order in which a token a second can be served."""
    if not any(left):
        return 0
    ready = [i for i, n in enumerate(left) if n and arrivals[i] <= now]
    if not ready:
        return least_total(now + 1, left, arrivals)
    totals = []
    for i in ready:
        after = tuple(n - (j == i) for j, n in enumerate(left))
        totals.append((now + 1) * (after[i] == 0) + least_total(now + 1, after, arrivals))
    return min(totals)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=4))
def test_no_order_has_a_smaller_mean_than_shortest_remaining(trace):
    arrivals, lengths = zip(*trace)
    finished, _ = run(one_at_a_time(ShortestRemaining()), jobs(*trace))
    assert sum(finished) == least_total(0, lengths, arrivals)


def test_decodes_go_first_and_prompts_fill_what_they_leave():
    requests = [Request((1,) * 3, 4), Request((1,) * 10, 2, arrival_s=1), Request((1,) * 2, 2, arrival_s=1)]
    scheduler = Scheduler(BlockPool(100, 4), FirstCome(), token_budget=5, max_running=8)
    finished, steps = run(scheduler, requests)
    assert steps == [{0: 3}, {0: 1, 1: 4}, {0: 1, 1: 4}, {0: 1, 1: 2, 2: 2}, {1: 1, 2: 1}]
    assert finished == [4, 5, 5]


def test_a_prompt_of_better_rank_does_not_hold_up_a_decode():
    requests = [Request((1,) * 3, 20), Request((1,) * 10, 1, arrival_s=1)]
    _, steps = run(Scheduler(BlockPool(100, 4), ShortestRemaining(), token_budget=5, max_running=8), requests)
    assert steps[:4] == [{0: 3}, {0: 1, 1: 4}, {0: 1, 1: 4}, {0: 1, 1: 2}]


def test_the_last_in_rank_loses_its_blocks_and_reads_its_text_again():
    requests = [Request((1,) * 4, 5), Request((2,) * 4, 3)]
    scheduler = Scheduler(BlockPool(3, 4), FirstCome(), token_budget=100, max_running=8)
    finished, steps = run(scheduler, requests)
    # Each has a block; the first takes the third for its fifth token, and the second finds none.
    assert steps == [{0: 4, 1: 4}, {0: 1}, {0: 1}, {0: 1}, {0: 1}, {1: 1}, {1: 1}]
    assert finished == [5, 7]
    scheduler = Scheduler(BlockPool(2, 4), FirstCome(), token_budget=100, max_running=8)
    finished, steps = run(scheduler, requests)
    assert steps == [{0: 4, 1: 4}, {0: 1}, {0: 1}, {0: 1}, {0: 1}, {1: 5}, {1: 1}]
    assert finished == [5, 7]
