"""Switch: every token goes to one of E experts, which are spread over ep ranks; two all-to-alls take rows there and back.

    expert(t) = argmax of p(t) = softmax(router x(t))        y(t) = p(t) of that expert * expert(x(t))

A routing group is one sequence. In it an expert has room for ceil(T/E * capacity_factor) tokens, the first that choose it;
the others are dropped: y is 0, and they live on in the residual stream. Groups are a property of the model: were they "the
tokens of this rank", another number of ranks would drop other tokens.

    balance loss   E * sum_e f_e P_e of each group, f_e the part of its tokens that choose e, P_e the mean of p_e
    z-loss         mean of logsumexp(logits)^2

Sends (ep-1)/ep of the kept rows there, as many back, and the same backward; 8 E bytes of counts to each other rank.

The library's: minipar.SwitchMoE, plus top-k, other routers, shared experts, padded buffers, overlap, two levels, metrics.
Source: Switch Transformers, arXiv:2101.03961, section 2.2; z-loss: ST-MoE, arXiv:2202.08906, equation 5.
"""

from fractions import Fraction
from math import ceil

import torch
import torch.nn.functional as F

from minipar.simple.autograd import all_to_all


def switch(comm, x, router, gate, up, down, capacity_factor=1.25):
    """(y, balance_loss, z_loss, dropped), losses as means over this rank's groups.

    x, y      [B, T, D]                          this rank's samples
    router    [E, D]                             the same on every rank
    gate, up  [E/ep, F, D]    down [E/ep, D, F]  this rank's experts
    """
    (B, T, D), E = x.shape, len(router)
    if len(gate) * comm.size != E:
        raise ValueError(
            f"{comm.size} ranks with {len(gate)} experts each, and {E} in the router; see minipar.SwitchMoE"
        )
    logits = x @ router.t()
    probs = logits.softmax(-1)
    weight, expert = probs.max(-1)  # [B, T]
    chosen = F.one_hot(expert, E)  # [B, T, E]
    place = (chosen.cumsum(1) * chosen).sum(-1) - 1  # in the expert's queue, from 0
    kept = place < min(T, ceil(Fraction(T, E) * Fraction(str(capacity_factor))))

    tokens = kept.flatten().nonzero()[:, 0]
    tokens = tokens[expert.flatten()[tokens].argsort(stable=True)]  # sorted by expert, so by rank
    counts = torch.bincount(expert.flatten()[tokens], minlength=E)
    y = x.new_zeros(B * T, D)
    results = _through_experts(comm, x.reshape(B * T, D)[tokens], counts, gate, up, down)
    y = y.index_copy(0, tokens, results * weight.flatten()[tokens, None]).view(B, T, D)

    f, P = chosen.to(probs.dtype).mean(1), probs.mean(1)  # [B, E]
    return y, E * (f * P).sum(1).mean(), logits.logsumexp(-1).square().mean(), int((~kept).sum())


def _through_experts(comm, rows, counts, gate, up, down):
    """Each row's answer, in the order of the rows, which are sorted by expert."""
    ep, own = comm.size, len(gate)
    table = comm.all_gather(counts).view(ep, ep, own)  # [from, to, its expert]: how many rows
    sent, received = table[comm.rank].sum(1).tolist(), table[:, comm.rank].sum(1).tolist()
    arrived = all_to_all(comm, rows, sent, received)
    segments = list(arrived.split(table[:, comm.rank].flatten().tolist()))  # sorted by rank, then by expert
    for e in range(own):
        parts = segments[e::own]  # from every rank
        h = torch.cat(parts)
        h = (F.silu(h @ gate[e].t()) * (h @ up[e].t())) @ down[e].t()
        segments[e::own] = h.split([len(part) for part in parts])
    return all_to_all(comm, torch.cat(segments), received, sent)
