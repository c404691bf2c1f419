"""1F1B as data: the bubble of GPipe, and fewer microbatches alive.

    p = 2, m = 3    rank 0    F0 F1    B0 F2 B1    B2
                    rank 1       F0 B0 F1 B1 F2 B2

A rank runs a backward if one is possible; otherwise a forward, if fewer than p-r microbatches are alive on it.

Checked: if a forward takes 1 and a backward 2, a step takes 3(m + p - 1), as in GPipe; rank r keeps min(p-r, m)
microbatches alive; a ValueError if p or m is below 1.
"""

from minipar.schedules import Schedule


def one_f_one_b(p, m) -> Schedule:
    """Return Schedule(actions, stage_rank, m, name) of minipar.schedules.

    actions      per rank a tuple of minipar.schedules.Action(op, stage, microbatch), op "F" or "B"
    stage_rank   per stage its rank
    """
    raise NotImplementedError
