"""Several steps in flight in a pipeline: groups of requests take turns, so that no stage waits for the last stage's tokens.

A single group would leave pp - 1 of pp stages idle, since its next step begins with tokens that the last stage chooses.
With pp groups, A B C D, the next group enters stage 0 as soon as the one before has left it:

    stage 0   A1 B1 C1 D1 A2 B2 C2 D2
    stage 1      A1 B1 C1 D1 A2 B2 C2 D2
    stage 2         A1 B1 C1 D1 A2 B2 C2 D2
    stage 3            A1 B1 C1 D1 A2 B2 C2 D2      A1's tokens are at stage 0 when A2 enters it

No list of groups is kept: a group is the requests of one step, and no request enters a step until its tokens of the
previous one are known. Free requests are divided evenly among the steps that may begin (`share`), so groups stay about
equal.

Source: virtual engines of a pipeline in vLLM; for the bubbles of a pipeline, Sarathi-Serve, arXiv:2403.02310, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.support.errors import require_positive


def share(num_free: int, num_all: int, num_under_way: int, num_groups: int) -> int:
    """Return how many of `num_free` requests enter the next step; `num_all` also counts the requests in flight.

    num_under_way  number of steps in flight, less than num_groups

    No group gets more than an equal part of all requests, and the steps that may begin now get equal parts of the free
    requests.
    """
    return min(-(-num_all // num_groups), -(-num_free // (num_groups - num_under_way)))


def utilisation(num_groups: int, num_stages: int, num_steps: int) -> float:
    """Return the fraction of time, in virtual time, that stages compute; each group runs `num_steps` equal steps.

    A step computes for s seconds in each of p stages; g <= p groups of n steps are served in (n p + g - 1) s seconds:

        g n p s / (p (n p + g - 1) s) = g n / (n p + g - 1),   and g / p for many steps

    Raises ValueError unless all are positive and there are at most as many groups as stages: more groups would only wait.
    """
    require_positive(num_groups=num_groups, num_stages=num_stages, num_steps=num_steps)
    if num_groups > num_stages:
        raise ValueError(f"num_groups={num_groups} exceeds num_stages={num_stages}; use at most as many")
    return num_groups * num_steps / (num_steps * num_stages + num_groups - 1)


class StageClock:
    """The virtual time at which each stage becomes free. Steps leave in the order in which they entered.

    A step begins at a stage once it has left the previous stage and the previous step has left this one.
    """

    def __init__(self, num_stages: int):
        self.free_s = [0.0] * num_stages

    def run(self, ready_s: float, stage_seconds: Sequence[float]) -> tuple[float, float]:
        """Return when a step that is ready at `ready_s` enters stage 0, and when it leaves the last stage."""
        begin_s = left_s = max(ready_s, self.free_s[0])
        for stage, seconds in enumerate(stage_seconds):
            left_s = max(left_s, self.free_s[stage]) + seconds
            self.free_s[stage] = left_s
        return begin_s, left_s
