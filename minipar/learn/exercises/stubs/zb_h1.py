"""ZB-H1: 1F1B with B split into I, the input's gradient, and W, the weights' gradient, for which no other rank waits.

Checked: with F=I=W=1 and m >= p a step takes 3m + p - 1, where 1F1B takes 3(m + p - 1); no rank keeps more than
min(p, m) microbatches alive (a microbatch lives until its W ends); a ValueError if p or m is below 1.
"""

from minipar.schedules import Schedule


def zb_h1(p, m) -> Schedule:
    """Return Schedule(actions, stage_rank, m, name) of minipar.schedules.

    actions      per rank a tuple of minipar.schedules.Action(op, stage, microbatch), op "F", "I" or "W"
    stage_rank   per stage its rank
    """
    raise NotImplementedError
