"""Ring attention, forward: rank r has block r of the sequence; keys and values go around a ring, queries stay.

    lse = log sum over parts of exp(lse_part)        out = sum over parts of exp(lse_part - lse) out_part

Held to: softmax(q k^T / sqrt(d)) v over the whole sequence, also for scores of hundreds; 2(p-1) blocks sent by each
rank.
"""


def ring_forward(comm, q, k, v, causal=True):
    """q, k, v, out [B, H, N/p, d] -> (out, lse), lse [B, H, N/p] of each query's scores over all keys. Use comm.exchange.

    causal    a query attends to keys at its own place in the whole sequence and before
    """
    raise NotImplementedError
