"""Policies: the order in which requests get their share of a step's tokens, of `max_running`, and of memory.

A policy ranks requests by what the scheduler knows about them. The request with the smallest rank goes first; when there
are too few blocks, the request with the largest rank loses its blocks. A policy sees arrivals and counts of tokens, never a
clock.
"""

from __future__ import annotations

from typing import Any, Protocol

from minipar.support.errors import one_of


class Ranked(Protocol):
    """All that a policy may know about a request.

    number      its index in the list of requests
    remaining   maximum number of tokens that it still has to prefill and decode; an end token may come earlier
    num_served  tokens that the model has processed for it so far, including those recomputed after a preemption
    """

    @property
    def number(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def remaining(self) -> int: ...
    @property
    def num_served(self) -> int: ...


class Policy(Protocol):
    def rank(self, request: Ranked) -> tuple[Any, ...]: ...


class FirstCome:
    """The earliest arrival goes first. No request waits for a later one, but short requests wait for earlier long ones."""

    def rank(self, request: Ranked) -> tuple[Any, ...]:
        return request.arrival_s, request.number


class ShortestRemaining:
    """The request with the fewest tokens left goes first: the mean completion time is least, but long requests wait.

    On one machine that serves one token per step, no order of the same requests has a smaller mean (Schrage, 1968).
    """

    def rank(self, request: Ranked) -> tuple[Any, ...]:
        return request.remaining, request.arrival_s, request.number


class MultiLevelFeedback:
    """Requests served few tokens so far go first, by levels. This favours short requests without knowing their lengths.

    A request begins at level 0 and goes down a level when it has been served `quantum` tokens, then twice as many, four
    times as many, and so on. Within a level, the earliest arrival goes first.
    Source: FastServe, arXiv:2305.05920, section 4.
    """

    def __init__(self, quantum: int = 16, num_levels: int = 6):
        self.quantum, self.num_levels = quantum, num_levels

    def rank(self, request: Ranked) -> tuple[Any, ...]:
        level = (request.num_served // self.quantum + 1).bit_length() - 1
        return min(level, self.num_levels - 1), request.arrival_s, request.number


POLICIES: dict[str, type[Policy]] = {
    "first-come": FirstCome,
    "shortest-remaining": ShortestRemaining,
    "multi-level-feedback": MultiLevelFeedback,
}


def find_policy(name: str) -> Policy:
    """Return the policy of this name. Raises ValueError if there is none."""
    if name not in POLICIES:
        raise ValueError(f"policy={name!r} is unknown; use {one_of(POLICIES, near=name)}")
    return POLICIES[name]()
