"""GPipe and its looped form: every forward, then every backward.

Adds to `simple/pipeline.py`: schedules as data, and several chunks per rank.
"""

from __future__ import annotations

from minipar.schedules.schedule import Action, Schedule
from minipar.support.errors import require_positive


def gpipe(p: int, m: int) -> Schedule:
    """Return GPipe: all m forwards, then all m backwards, on p ranks of one stage each.

    The bubble is (p-1)/m of the ideal time; every rank keeps m microbatches alive. Backwards run in ascending order of
    microbatches (in the paper's figure, in descending order). The time is the same, and gradients are summed in the same
    order as in one process.
    Raises ValueError if p or m is below 1.
    Source: GPipe, arXiv:1811.06965, section 2.3.
    """
    return Schedule(breadth_first(p, m, 1).actions, tuple(range(p)), m, "gpipe")


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """Return looped GPipe: rank r holds stages r, r+p, ... and runs all m microbatches on one stage before the next.

    The bubble is (p-1)/(vm) of the ideal time if m >= p; every rank keeps v m chunks alive.
    Raises ValueError if p, m or v is below 1.
    Source: Breadth-First Pipeline Parallelism, arXiv:2211.05953, section 4.
    """
    require_positive(p=p, m=m, v=v)
    return Schedule(
        tuple(_rank_actions(range(rank, p * v, p), m) for rank in range(p)),
        tuple(stage % p for stage in range(p * v)),
        m,
        "breadth-first",
    )


def _rank_actions(stages: range, m: int) -> tuple[Action, ...]:
    forwards = [Action("F", stage, k) for stage in stages for k in range(m)]
    backwards = [Action("B", stage, k) for stage in reversed(stages) for k in range(m)]
    return tuple(forwards + backwards)
