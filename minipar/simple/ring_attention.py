"""Ring attention: rank r has block r of a sequence cut into p; keys and values are sent around a ring, queries stay.

A softmax over a part of the keys is wrong only by a factor, which follows from the log-sum-exp (lse) of that part's scores:

    out = sum_parts exp(lse_part - lse) out_part        lse = log sum_parts exp lse_part

The backward sends keys and values around again and recomputes the weights from the saved lse. A block's dk and dv are sent
along with it, and each rank adds its term:

    weights = exp(scores - lse)    dscores = weights * (dout v^T - delta)    delta = sum over features of dout * out
    dv = weights^T dout            dq = dscores k / sqrt(head_dim)           dk = dscores^T q / sqrt(head_dim)

A rank sends 2 (p-1)/p N h elements forward and 4 (p-1)/p N h backward, for each sample of N tokens, h = heads * head_dim.

In the library: minipar.ring_attention, which adds communication overlapped with compute, tiles instead of the block's whole
score matrix, a balanced causal layout (zigzag), grouped queries, documents.
Source: arXiv:2310.01889, section 3.
"""

import torch


def ring_attention(comm, q, k, v, causal=True):
    """This rank's block of softmax(q k^T / sqrt(head_dim)) v.   q, k, v, out [B, H, N/p, head_dim]"""
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]} differ; use minipar.ring_attention")
    return _RingAttention.apply(q, k, v, comm, causal)


def _scores(comm, q, k, source, causal):
    """Score this rank's queries against the keys of rank `source`; causal: -inf where the key is after the query."""
    scores, place = q @ k.transpose(2, 3) / q.shape[3] ** 0.5, torch.arange(q.shape[2], device=q.device)
    later = (source * len(place) + place)[None, :] > (comm.rank * len(place) + place)[:, None]
    return scores.masked_fill(later, -torch.inf) if causal else scores


def _pass_on(comm, x):
    return comm.exchange(x, (comm.rank + 1) % comm.size, x.shape, x.dtype, (comm.rank - 1) % comm.size)


def ring_forward(comm, q, k, v, causal=True):
    """Return out and lse [B, H, N/p], the log-sum-exp of each query's scores over the keys of all ranks."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    kv = torch.stack((k, v))
    for step in range(comm.size):
        scores = _scores(comm, q, kv[0], (comm.rank - step) % comm.size, causal)
        total = torch.logaddexp(lse, scores.logsumexp(3))
        weights = (scores - total[..., None]).exp()  # <= 1; finite: step 0 is the own block
        out = (lse - total).exp()[..., None] * out + weights @ kv[1]
        lse, kv = total, kv if step == comm.size - 1 else _pass_on(comm, kv)
    return out, lse


def ring_backward(comm, q, k, v, out, lse, dout, causal=True):
    """Return dq, dk, dv of this rank's block."""
    delta, dq, scale = (dout * out).sum(3, keepdim=True), torch.zeros_like(q), q.shape[3] ** -0.5
    kv, own, travelling = torch.stack((k, v)), None, 0
    for step in range(comm.size):
        weights = (_scores(comm, q, kv[0], (comm.rank - step) % comm.size, causal) - lse[..., None]).exp()
        dscores = weights * (dout @ kv[1].transpose(2, 3) - delta) * scale
        dq += dscores @ kv[0]
        mine = torch.stack((dscores.transpose(2, 3) @ q, weights.transpose(2, 3) @ dout))
        # The own block's dk and dv stay here; to another's, add the sum that came along with the block, and pass it on.
        own, travelling = (own, _pass_on(comm, mine + travelling)) if step else (mine, 0)
        kv = kv if step == comm.size - 1 else _pass_on(comm, kv)
    return dq, *(own + travelling)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, causal):
        out, lse = ring_forward(comm, q, k, v, causal)
        ctx.comm, ctx.causal = comm, causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return *ring_backward(ctx.comm, *ctx.saved_tensors, dout, ctx.causal), None, None
