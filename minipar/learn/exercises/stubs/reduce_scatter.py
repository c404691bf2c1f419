"""Reduce-scatter around a ring.

Rank r sends to r+1 and receives from r-1, p-1 times, one chunk per step; it ends with chunk r of the sum:

    rank      0             1             2
    x         a0 a1 a2      b0 b1 b2      c0 c1 c2
    result    a0+b0+c0      a1+b1+c1      a2+b2+c2

Checked: (p-1)/p of x's bytes sent by each rank; x is not written to. Split x as torch.chunk does, into chunks of ceil(N/p),
the last ones shorter or empty.
"""


def reduce_scatter(comm, x):
    """x [N, ...] -> chunk r, along dim 0, of the sum over ranks of x. Use comm.exchange."""
    raise NotImplementedError
