"""All-gather around a ring.

Rank r sends to r+1 and receives from r-1, p-1 times; after the first time, it sends the chunk that it received last:

    rank      0        1        2
    chunk     a        b        c
    result    a b c    a b c    a b c

Checked: p-1 chunks sent by each rank; the chunk is not written to.
"""


def all_gather(comm, chunk):
    """chunk [n, ...], of the same shape on every rank -> [p n, ...], all ranks' chunks in rank order. Use comm.exchange."""
    raise NotImplementedError
