"""All-reduce by recursive halving and doubling (Rabenseifner), for any p.

    halving     exchange half the vector with the rank at distance q/2, add; a quarter at q/4; ... rank r ends with chunk r
    doubling    the same steps backwards: every exchange doubles what a rank has of the sum

q is the largest power of two up to p. A rank r >= q first sends x to r-q, which adds it, and at the end receives the
result.

Held to: 2 log2 q messages and 2(q-1)/q of x's bytes for a rank below q, one message and x more if another folded into
it; one message for a rank from q on. x is not written to; every rank ends with the same bits.
"""


def all_reduce(comm, x):
    """x [...] -> the sum over ranks of x, of x's shape. Use comm.send, comm.recv and comm.exchange."""
    raise NotImplementedError
