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
from torch.autograd import Function


def ring_attention(comm, q, k, v, causal=True):
    """This rank's block of softmax(q k^T / sqrt(head_dim)) v.   q, k, v, out [B, H, N/p, head_dim]"""
    if not q.shape == k.shape == v.shape:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} differ; use minipar.ring_attention"
        )
    return _RingAttention.apply(q, k, v, comm, causal)


def _scores(comm, q, k, source, causal):
    """Score this rank's queries against the keys of rank `source`; causal: -inf where the key is after the query."""
    n = q.shape[2]
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    place = torch.arange(n, device=q.device)
    later = (source * n + place)[None, :] > (comm.rank * n + place)[:, None]  # in the whole sequence
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
            weights = (scores - total[..., None]).exp()  # <= 1; finite: step 0 is the own block
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
                own = mine  # dk, dv of this rank's own block: kept here, to add the other ranks' terms at the end
            else:  # add to the sum that the previous ranks sent along with this block
                travelling = _pass_on(comm, mine if travelling is None else travelling + mine)
            kv = kv if step == comm.size - 1 else _pass_on(comm, kv)
        dk, dv = own if travelling is None else own + travelling
        return dq, dk, dv, None, None
