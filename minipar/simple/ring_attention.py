"""Ring attention: rank r has block r of a sequence cut into p; keys and values are sent around a ring, queries stay.

The block of keys and values that a rank has in each step, p = 4; in brackets if a causal mask leaves nothing of it:

              rank 0    rank 1    rank 2    rank 3
    step 0      0         1         2         3        each starts with its own block
    step 1     (3)        0         1         2        received from the left, rank r-1
    step 2     (2)       (3)        0         1
    step 3     (1)       (2)       (3)        0        rank 0 only passes on; all wait for rank 3

Zigzag balances the work: of 2p pieces, rank r has an early one, r, and a late one, 2p-1-r:   0 7 | 1 6 | 2 5 | 3 4

The softmax over a part of the keys is wrong only by a factor, which the log-sum-exp (lse) of that part's scores determines:

    out = sum_parts exp(lse_part - lse) out_part        lse = log sum_parts exp lse_part

The backward sends keys and values around again and recomputes the weights P from the saved lse. A block's dK and dV are
sent along with it, and each rank adds its term. With the scores S, delta = sum over features of dO * O, d = head_dim:

    P = exp(S - lse)      dS = P * (dO V^T - delta) / sqrt(d)      dQ = dS K      dK = dS^T Q      dV = P^T dO

A rank sends 2 (p-1)/p N h elements forward and 4 (p-1)/p N h backward, for each sample of N tokens, h = heads * head_dim.

In the library: minipar.ring_attention, which adds communication overlapped with compute, tiles instead of the block's whole
score matrix, the zigzag layout, grouped queries, documents.
Sources: arXiv:2310.01889, section 3; zigzag: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

import torch


def ring_attention(comm, q, k, v, causal=True):
    """This rank's block of softmax(q k^T / sqrt(head_dim)) v.   q, k, v, out [B, H, N/p, head_dim]"""
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]} differ; use minipar.ring_attention")
    return RingAttention.apply(q, k, v, comm, causal)


def pass_on(comm, x):
    """Send x to the right neighbour and return what the left one sent."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return comm.exchange(x, right, x.shape, x.dtype, left)


def scores_of(comm, q, k, source, causal):
    """Score this rank's queries against the keys of rank `source`; causal: -inf where the key is after the query."""
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if not causal:
        return scores
    n = q.shape[2]
    place = torch.arange(n, device=q.device)
    key_is_later = (source * n + place)[None, :] > (comm.rank * n + place)[:, None]
    return scores.masked_fill(key_is_later, -torch.inf)


def ring_forward(comm, q, k, v, causal=True):
    """Return out and lse [B, H, N/p], the log-sum-exp of each query's scores over the keys of all ranks."""
    p, r = comm.size, comm.rank
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -torch.inf)
    kv = torch.stack((k, v))
    for step in range(p):
        scores = scores_of(comm, q, kv[0], (r - step) % p, causal)
        new_lse = torch.logaddexp(lse, scores.logsumexp(3))
        weights = (
            scores - new_lse[..., None]
        ).exp()  # at most 1; finite, because step 0 has this rank's own block
        out = (lse - new_lse).exp()[..., None] * out + weights @ kv[1]
        lse = new_lse
        if step < p - 1:
            kv = pass_on(comm, kv)
    return out, lse


def ring_backward(comm, q, k, v, out, lse, dout, causal=True):
    """Return dq, dk, dv of this rank's block."""
    p, r = comm.size, comm.rank
    scale = q.shape[3] ** -0.5
    delta = (dout * out).sum(3, keepdim=True)
    dq = torch.zeros_like(q)
    kv = torch.stack((k, v))
    for step in range(p):
        scores = scores_of(comm, q, kv[0], (r - step) % p, causal)
        P = (scores - lse[..., None]).exp()
        dS = P * (dout @ kv[1].transpose(2, 3) - delta) * scale
        dq += dS @ kv[0]
        # This rank's term of the dk and dv of the block that is here.
        term = torch.stack((dS.transpose(2, 3) @ q, P.transpose(2, 3) @ dout))
        if step == 0:
            own_term = term  # the term of this rank's own block stays here
            travelling = torch.zeros_like(term)
        else:  # a term of another rank's block: added to the sum that arrived with the block
            travelling = pass_on(comm, travelling + term)
        if step < p - 1:
            kv = pass_on(comm, kv)
    dk, dv = own_term + travelling  # after p-1 hops, the sum of the other ranks' terms is back
    return dq, dk, dv


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, causal):
        out, lse = ring_forward(comm, q, k, v, causal)
        ctx.comm, ctx.causal = comm, causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = ring_backward(ctx.comm, *ctx.saved_tensors, dout, ctx.causal)
        return dq, dk, dv, None, None
