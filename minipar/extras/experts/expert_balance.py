"""The choice, by measured load, of the ranks that hold each expert. Imports no torch.

An expert is in a slot: with n = E/ep experts a rank, slot s is entry s % n of rank s // n. A placement is the tuple of the
experts of slots 0, 1, ...; at first, expert e is in slot e.
"""

from __future__ import annotations

from collections.abc import Sequence


def rank_loads(loads: Sequence[int], experts: Sequence[int], ep: int) -> list[int]:
    """Return the load of each rank, where `experts` are those of slots 0, 1, ..., and loads[e] is expert e's."""
    n = len(experts) // ep
    return [sum(loads[e] for e in experts[rank * n : (rank + 1) * n]) for rank in range(ep)]


def balanced(loads: Sequence[int], experts: Sequence[int], ep: int) -> tuple[int, ...]:
    """Return `experts` after swaps between ranks, each of which lowers the load of the busiest rank.

    Ends when no swap of one of the busiest rank's experts with another rank's leaves both of them with less than the
    busiest has. Of such swaps, the one is made that leaves the least to the busier of the two ranks.
    """
    n, placed = len(experts) // ep, list(experts)
    while True:
        of_ranks = rank_loads(loads, placed, ep)
        most = max(of_ranks)
        busiest = of_ranks.index(most)
        best = (most, 0, 0)
        for mine in range(busiest * n, (busiest + 1) * n):
            for other in (s for s in range(len(placed)) if s // n != busiest):
                more = loads[placed[mine]] - loads[placed[other]]
                best = min(best, (max(most - more, of_ranks[other // n] + more), mine, other))
        left, mine, other = best
        if left >= most:
            return tuple(placed)
        placed[mine], placed[other] = placed[other], placed[mine]


def num_moved(before: Sequence[int], after: Sequence[int], ep: int) -> list[int]:
    """Return for each rank the number of experts that it held before and not after: those whose weights it sends."""
    n = len(before) // ep
    ranks = [slice(rank * n, (rank + 1) * n) for rank in range(ep)]
    return [len(set(before[own]) - set(after[own])) for own in ranks]
