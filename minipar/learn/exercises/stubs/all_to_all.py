"""All-to-all, in pairs: chunk s of rank r's x becomes chunk r of rank s's result.

    rank      0           1           2
    x         a0 a1 a2    b0 b1 b2    c0 c1 c2
    result    a0 b0 c0    a1 b1 c1    a2 b2 c2

Checked: each rank sends every chunk except its own once, so p-1 messages. Chunks may differ in length, and may be empty.
"""


def all_to_all(comm, x, send_sizes, recv_sizes):
    """x [sum(send_sizes), ...] -> [sum(recv_sizes), ...], chunks along dim 0. Use comm.exchange.

    send_sizes[s]   rows for rank s          recv_sizes[s]   rows from rank s
    """
    raise NotImplementedError
