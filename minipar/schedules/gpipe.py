"""GPipe and its looped form: every forward, then every backward.

`simple/pipeline.py`, plus schedules as data and several chunks per rank.
"""

from __future__ import annotations

from minipar.errors import require_positive
from minipar.schedules.schedule import Action, Schedule


def gpipe(p: int, m: int) -> Schedule:
    """All m forwards, then all m backwards, on p ranks of one stage each.

    bubble over ideal (p-1)/m; every rank keeps m microbatches alive. Backwards run in ascending order
    of microbatches, where the paper's figure has them descending: the time is the same, and the gradients are
    summed in the same order as in one process.
    Raises ValueError where p or m is below 1.
    Source: GPipe, arXiv:1811.06965, section 2.3.
    """
    return Schedule(breadth_first(p, m, 1).actions, tuple(range(p)), m, "gpipe")


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """Looped GPipe: rank r holds stages r, r+p, ... and runs all m microbatches on one before the next.

    bubble over ideal (p-1)/(vm) where m >= p; every rank keeps v m chunks alive.
    Raises ValueError where p, m or v is below 1.
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
