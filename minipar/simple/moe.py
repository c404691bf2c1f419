"""Switch, a mixture of E experts: the router sends each token to one expert; the experts are sharded over ep ranks.

    p(t) = softmax(router x(t))        e = argmax_i p_i(t)        y(t) = p_e(t) * expert_e(x(t))

One all-to-all sends each token's row to the rank of its expert (dispatch), another returns the result (combine). A routing
group is one sequence of T tokens. An expert's capacity is ceil(T/E * capacity_factor) tokens per group: it takes the first
that choose it. The others are dropped: their y is 0, so after the residual connection they are unchanged. If a group were
"the tokens of this rank" instead, which tokens are dropped would depend on the number of ranks.

    balance loss   E * sum_e f_e P_e per group; f_e: the fraction of its tokens that choose e, P_e: the mean of p_e
    z-loss         mean of logsumexp(logits)^2

Sends (ep-1)/ep of the kept rows in each all-to-all, if routing is balanced: two in the forward, two in the backward. The
all-gather of the counts sends 8 E (ep-1) bytes more.

In the library: minipar.SwitchMoE, plus top-k, other routers, shared experts, padded buffers, overlap, two levels, metrics.
Source: Switch Transformers, arXiv:2101.03961, section 2.2; z-loss: ST-MoE, arXiv:2202.08906, equation 5.
"""

from fractions import Fraction
from math import ceil

import torch
import torch.nn.functional as F

from minipar.simple.autograd import all_to_all


def switch(comm, x, router, gate, up, down, capacity_factor=1.25):
    """Return (y, balance_loss, z_loss, dropped): means over this rank's groups, and its number of dropped tokens.

    x, y      [B, T, D]                          this rank's B groups
    router    [E, D]                             the same on every rank
    gate, up  [E/ep, F, D]    down [E/ep, D, F]  this rank's experts, from number rank * E/ep on
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
    place = (chosen.cumsum(1) * chosen).sum(-1) - 1  # among the group's tokens that chose this expert
    # Fractions are exact: in floats, a capacity of 100 * 1.1 is rounded up to 111.
    kept = place < min(T, ceil(Fraction(T, E) * Fraction(str(capacity_factor))))

    tokens = kept.flatten().nonzero()[:, 0]
    tokens = tokens[expert.flatten()[tokens].argsort(stable=True)]  # sorted by expert, so also by rank
    counts = torch.bincount(expert.flatten()[tokens], minlength=E)
    y = x.new_zeros(B * T, D)
    results = _through_experts(comm, x.reshape(B * T, D)[tokens], counts, gate, up, down)
    y = y.index_copy(0, tokens, results * weight.flatten()[tokens, None]).view(B, T, D)

    f, P = chosen.to(probs.dtype).mean(1), probs.mean(1)  # [B, E]
    return y, E * (f * P).sum(1).mean(), logits.logsumexp(-1).square().mean(), int((~kept).sum())


def _through_experts(comm, rows, counts, gate, up, down):
    """Dispatch rows [R, D], sorted by expert, run the experts, and combine: the results, in the order of `rows`."""
    ep, own = comm.size, len(gate)
    table = comm.all_gather(counts).view(ep, ep, own)  # [from, to, expert of `to`]: how many rows
    sent, received = table[comm.rank].sum(1).tolist(), table[:, comm.rank].sum(1).tolist()
    arrived = all_to_all(comm, rows, sent, received)
    segments = list(arrived.split(table[:, comm.rank].flatten().tolist()))  # by source rank, then by expert
    for e in range(own):
        parts = segments[e::own]  # this expert's rows, from each rank
        h = torch.cat(parts)
        h = (F.silu(h @ gate[e].t()) * (h @ up[e].t())) @ down[e].t()
        segments[e::own] = h.split([len(part) for part in parts])
    return all_to_all(comm, torch.cat(segments), received, sent)
