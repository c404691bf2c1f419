"""Broadcast by a binomial tree.

In each step every rank that has x sends it once, so the number of ranks that have it doubles:

    root 0, p = 8    0    0 4    0 2 4 6    0 1 2 3 4 5 6 7

Checked: every rank gets the root's x, for any root and any p; the root sends ceil(log2 p) messages, and all ranks together
send p-1.
"""


def broadcast(comm, x, root):
    """x [...], whose values matter only on the root -> the root's x, on every rank. Use comm.send and comm.recv."""
    raise NotImplementedError
