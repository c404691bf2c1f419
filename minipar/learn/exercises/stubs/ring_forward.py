"""Ring attention, forward: rank r has block r of the sequence; keys and values are sent around a ring, queries stay.

    lse = log sum over parts of exp(lse_part)        out = sum over parts of exp(lse_part - lse) out_part

Checked: softmax(q k^T / sqrt(d)) v over the whole sequence, also for scores in the hundreds; 2(p-1) blocks sent by each
rank.
"""


def ring_forward(comm, q, k, v, causal=True):
    """q, k, v, out [B, H, N/p, d] -> (out, lse), lse [B, H, N/p] of each query's scores over all keys. Use comm.exchange.

    causal    a query attends to keys up to its own position in the whole sequence
    """
    raise NotImplementedError
