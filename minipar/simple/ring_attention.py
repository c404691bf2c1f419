"""Ring attention: rank r has the r-th of P pieces of a sequence; keys and values travel around, queries stay.

A softmax over a part of the keys is wrong by a factor only, and the log-sum-exp of that part's scores says which:

    out = sum_parts exp(lse_part - lse) out_part        lse = log sum_parts exp lse_part

Backward the scores are computed again, P = exp(S - lse), and a block's dk and dv follow it around, growing at every rank:

    dv = P^T dout    dS = P * (dout v^T - delta)    dq = dS k    dk = dS^T q    delta = sum over features of dout * out

A rank sends 2 (P-1)/P N h elements forward and 4 (P-1)/P N h backward, for each sample of N tokens, h = heads * head_dim.

The library's: minipar.ring_attention, plus communication hidden behind compute, tiles in place of the block's matrix,
causal work shared evenly (zigzag), grouped queries, documents.
Source: arXiv:2310.01889, section 3.
"""

import torch
from torch.autograd import Function


def ring_attention(comm, q, k, v, causal=True):
    """This rank's part of softmax(q k^T / sqrt(head_dim)) v.   q, k, v, out [B, H, N/P, head_dim]"""
    if not q.shape == k.shape == v.shape:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} differ; use minipar.ring_attention"
        )
    return _RingAttention.apply(q, k, v, comm, causal)


def _scores(comm, q, k, source, causal):
    """Of my queries against the keys of rank `source`; -inf where a key comes later than the query."""
    n = q.shape[2]
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    place = torch.arange(n, device=q.device)
    later = (source * n + place)[None, :] > (comm.rank * n + place)[:, None]  # places in the whole sequence
    return scores.masked_fill(later, -torch.inf) if causal else scores


def _pass_on(comm, x):
    return comm.exchange(x, (comm.rank + 1) % comm.size, x.shape, x.dtype, (comm.rank - 1) % comm.size)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, causal):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        kv = torch.stack((k, v))
        for step in range(comm.size):
            scores = _scores(comm, q, kv[0], (comm.rank - step) % comm.size, causal)
            part = scores.logsumexp(3)
            total = torch.logaddexp(lse, part)
            weights = (scores - total[..., None]).exp()  # nothing overflows: total is no less than any score
            out = (lse - total).exp()[..., None] * out + weights @ kv[1]
            lse, kv = total, kv if step == comm.size - 1 else _pass_on(comm, kv)
        ctx.comm, ctx.causal = comm, causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        comm, scale = ctx.comm, q.shape[3] ** -0.5
        delta, dq = (dout * out).sum(3, keepdim=True), torch.zeros_like(q)
        kv, travelling = torch.stack((k, v)), None
        for step in range(comm.size):
            scores = _scores(comm, q, kv[0], (comm.rank - step) % comm.size, ctx.causal)
            weights = (scores - lse[..., None]).exp()
            dscores = weights * (dout @ kv[1].transpose(2, 3) - delta) * scale
            dq += dscores @ kv[0]
            mine = torch.stack((dscores.transpose(2, 3) @ q, weights.transpose(2, 3) @ dout))
            if step == 0:
                own = mine  # of my own block: stays, and waits for what the others find
            else:  # what the ranks before found for this block has arrived with it
                travelling = _pass_on(comm, mine if travelling is None else travelling + mine)
            kv = kv if step == comm.size - 1 else _pass_on(comm, kv)
        dk, dv = own if travelling is None else own + travelling
        return dq, dk, dv, None, None
