"""Ring attention, backward: keys and values are sent around the ring once more, and their gradients with them.

    weights = exp(scores - lse)    dscores = weights * (dout v^T - delta)    delta = sum over features of dout * out
    dv = weights^T dout            dq = dscores k / sqrt(d)                  dk = dscores^T q / sqrt(d)

Checked: the gradients of one process; 4(p-1) blocks sent by each rank.
"""


def ring_backward(comm, q, k, v, out, lse, dout, causal=True):
    """Return (dq, dk, dv). lse [B, H, N/p]; all others [B, H, N/p, d], this rank's block. Use comm.exchange."""
    raise NotImplementedError
