"""Broadcast by a binomial tree.

In each step every rank that has x sends it once, so the ranks that have it double:

    root 0, p = 8    0    0 4    0 2 4 6    0 1 2 3 4 5 6 7

Held to: every rank gets the root's x, for any root and any p; the root sends ceil(log2 p) messages, all ranks p-1
together.
"""


def broadcast(comm, x, root):
    """x [...], of which only the root's values count -> the root's x, on every rank. Use comm.send and comm.recv."""
    raise NotImplementedError
