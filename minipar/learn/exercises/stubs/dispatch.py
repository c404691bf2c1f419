"""Send rows to their experts and the results back: one all-to-all to the ranks of the experts, and another one back.

    expert(x) = (silu(x gate^T) * x up^T) down^T        expert e of E is on rank e // (E/p)

Checked: the results and gradients of one process; a rank may have no rows. Every row for another rank is sent once in each
all-to-all, of which there are two forward and two backward; in addition, each rank sends 8 E bytes of counts to each other
rank.
"""


def dispatch(comm, rows, counts, gate, up, down):
    """rows [R, D], sorted by expert -> [R, D], each row's result, in the same order.

    counts      [E]            how many of the rows are for each expert
    gate, up    [E/p, F, D]    down [E/p, D, F]    this rank's experts
    """
    raise NotImplementedError
