"""Ulysses: an all-to-all turns this rank's tokens of all heads into all tokens of its heads; then attention; then back.

    [B, H, N/p, d]  ->  [B, H/p, N, d]  ->  attention  ->  [B, H/p, N, d]  ->  [B, H, N/p, d]

Checked: the results and gradients of one process; each rank sends 8(p-1)/p^2 of the bytes of the whole sequence's q,
forward and backward together.
"""


def ulysses_attention(comm, q, k, v, causal=True):
    """q, k, v, out [B, H, N/p, d], this rank's tokens. Use all_to_all of minipar.simple.autograd."""
    raise NotImplementedError
