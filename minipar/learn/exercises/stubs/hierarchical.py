"""All-reduce inside nodes, then across them.

With k nodes of g consecutive ranks and n bytes, each rank sends

    inside its node    2 (g-1)/g n          a reduce-scatter, and at the end an all-gather
    out of its node    2 (k-1)/k n/g        an all-reduce of its chunk, with the corresponding ranks of the other nodes

Checked: both numbers of bytes, exactly; x of any length; a ValueError if node_size does not divide the number of ranks.
"""


def hierarchical(comm, x, *, node_size):
    """x [...] -> the sum over ranks of x. Use comm.subgroup(ranks, name) and its collectives with algorithm="ring"."""
    raise NotImplementedError
