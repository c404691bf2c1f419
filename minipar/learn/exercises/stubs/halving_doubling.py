"""All-reduce by recursive halving and doubling (Rabenseifner), for any p.

    halving     exchange half the vector with the rank at distance q/2, and add; then a quarter with the rank at distance
                q/4; and so on: rank r ends with chunk r of the sum
    doubling    the same steps backwards: every exchange doubles the part of the sum that a rank has

q is the largest power of two up to p. A rank r >= q first sends x to rank r-q, which adds it, and receives the result at
the end.

Checked: a rank below q sends 2 log2 q messages and 2(q-1)/q of x's bytes, and one more message of x's bytes if rank r+q
exists; a rank from q on sends one message. x is not written to; results are bitwise equal on all ranks.
"""


def all_reduce(comm, x):
    """x [...] -> the sum over ranks of x, of x's shape. Use comm.send, comm.recv and comm.exchange."""
    raise NotImplementedError
