"""GPipe as data: every forward, then every backward, for m microbatches on p ranks of one stage each.

    p = 2, m = 3    rank 0    F0 F1 F2       B0 B1 B2
                    rank 1       F0 F1 F2 B0 B1 B2

Checked: if a forward takes 1 and a backward 2, a step takes 3(m + p - 1); at most m microbatches are alive; a ValueError if
p or m is below 1. The backwards may run in any order. In the picture's order, gradients are added as in one process.
"""

from minipar.schedules import Schedule


def gpipe(p, m) -> Schedule:
    """Return Schedule(actions, stage_rank, m, name) of minipar.schedules.

    actions      per rank a tuple of minipar.schedules.Action(op, stage, microbatch), op "F" or "B"
    stage_rank   per stage its rank
    """
    raise NotImplementedError
