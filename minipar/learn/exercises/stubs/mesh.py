"""The groups of a mesh: ranks that differ only along some axes.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp, so tp varies fastest and pp slowest

    dp=2, tp=2    "tp" -> [0, 1] [2, 3]      "dp" -> [0, 2] [1, 3]      "dp", "tp" -> [0, 1, 2, 3]

Checked: for any axes, every rank is in exactly one group, with the right ranks.
"""


def groups(*axes, pp=1, dp=1, cp=1, tp=1):
    """Return the groups along these axes as lists of ranks: groups("tp", dp=2, tp=2) -> [[0, 1], [2, 3]]."""
    raise NotImplementedError
