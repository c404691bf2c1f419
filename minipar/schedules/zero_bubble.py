"""ZB-H1 and ZB-H2: 1F1B with split backwards, whose weight gradients fill the bubble."""

from __future__ import annotations

from minipar.schedules.one_f_one_b import alternate
from minipar.schedules.schedule import Action, Schedule
from minipar.support.errors import require_positive


def zb_h1(p: int, m: int) -> Schedule:
    """Return ZB-H1: 1F1B in which rank r defers its weight gradients by r microbatches, and runs them where 1F1B waits.

    For stages of equal cost and without latency, a rank idles (p-1)(F + I) - (min(p, m) - 1) min(F, W). That is
    (p-1)(F + I - W) if m >= p and W <= F, a third of 1F1B's idle time if F=I=W. Every rank keeps min(p, m) microbatches
    alive, as many as rank 0 in 1F1B.
    Raises ValueError if p or m is below 1.
    Source: Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1.
    """
    require_positive(p=p, m=m)
    return _split_1f1b(p, m, [p - 1 - rank for rank in range(p)], list(range(p)), "zb-h1")


def zb_h2(p: int, m: int) -> Schedule:
    """Return ZB-H2: ZB-H1 with twice the warm-up and twice the deferral, so forwards also fill the bubble at the start.

    For stages of equal cost and without latency, a rank idles (p-1)(F + I) - (min(2p-1, m) - 1) W if W <= F and
    2W <= F + I. That is (p-1)(F + I - 2W) if m >= 2p-1, and then zero if F=I=W. Every rank keeps min(2p-1, m) microbatches
    alive.
    Raises ValueError if p or m is below 1.
    Source: arXiv:2401.10241, section 2.2.
    """
    require_positive(p=p, m=m)
    return _split_1f1b(
        p, m, [2 * (p - 1 - rank) for rank in range(p)], [2 * rank for rank in range(p)], "zb-h2"
    )


def _split_1f1b(p: int, m: int, num_warmup: list[int], lag: list[int], name: str) -> Schedule:
    actions = []
    for rank in range(p):
        forwards = [Action("F", rank, k) for k in range(m)]
        halves = [Action("I", rank, k) for k in range(m)]
        actions.append(_with_weights(alternate(num_warmup[rank], forwards, halves), lag[rank]))
    return Schedule(tuple(actions), tuple(range(p)), m, name)


def _with_weights(actions: list[Action], lag: int) -> tuple[Action, ...]:
    """Insert after each I the W that belongs to the I `lag` positions before it; the last `lag` W come at the end."""
    deferred: list[Action] = []
    out: list[Action] = []
    for action in actions:
        out.append(action)
        if action.op == "I":
            deferred.append(action._replace(op="W"))
            if len(deferred) > lag:
                out.append(deferred.pop(0))
    return tuple(out + deferred)
