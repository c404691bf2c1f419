"""Switch, a mixture of E experts: the router sends each token to one expert; dispatch.py runs the experts, over ep ranks.

    p(t) = softmax(router x(t))        e = argmax_i p_i(t)        y(t) = p_e(t) * expert_e(x(t))

A routing group is one sequence of T tokens. An expert takes the first ceil(T/E * capacity_factor) tokens of a group that
choose it: its capacity. Later ones are dropped: their y is 0, so the residual connection leaves them unchanged.

    T = 6, E = 2, capacity_factor 1: capacity 3        token     0  1  2  3  4  5
        place: the index among its expert's tokens     chooses   0  0  1  0  0  1
                                                       place     0  1  0  2  3  1      token 4 is dropped: 3 is not < 3

If a group were "the tokens of this rank" instead, which tokens are dropped would depend on the number of ranks.

    balance loss   E * sum_e f_e P_e per group; f_e: the fraction of its tokens that choose e, P_e: the mean of p_e
    z-loss         mean of logsumexp(logits)^2

In the library: minipar.SwitchMoE, plus top-k, other routers, shared experts, padded buffers, metrics.
Source: Switch Transformers, arXiv:2101.03961, section 2.2; z-loss: ST-MoE, arXiv:2202.08906, equation 5.
"""

from fractions import Fraction
from math import ceil

import torch
import torch.nn.functional as F

from .dispatch import dispatch


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
    weight, choice = probs.max(-1)  # [B, T]
    chosen = F.one_hot(choice, E)  # [B, T, E]
    kept = within_capacity(chosen, capacity_factor)

    weight, choice = weight.flatten(), choice.flatten()
    tokens = kept.flatten().nonzero()[:, 0]
    tokens = tokens[choice[tokens].argsort(stable=True)]  # sorted by expert, so also by rank
    counts = torch.bincount(choice[tokens], minlength=E)
    results = dispatch(comm, x.reshape(B * T, D)[tokens], counts, gate, up, down)
    y = x.new_zeros(B * T, D).index_copy(0, tokens, results * weight[tokens, None])

    return y.view(B, T, D), balance_loss(chosen, probs), z_loss(logits), int((~kept).sum())


def within_capacity(chosen, capacity_factor):
    """Return which tokens their expert has room for.   chosen [B, T, E], one-hot -> [B, T]"""
    T, E = chosen.shape[1:]
    place = (chosen.cumsum(1) * chosen).sum(-1) - 1  # index among the group's tokens of the same expert
    # Fractions are exact: in floats, a capacity of 100 * 1.1 is rounded up to 111.
    capacity = ceil(Fraction(T, E) * Fraction(str(capacity_factor)))
    return place < min(T, capacity)


def balance_loss(chosen, probs):
    """1 if all experts are chosen equally often, up to E if all tokens choose one: the gradient moves p away from it."""
    f, P = chosen.to(probs.dtype).mean(1), probs.mean(1)  # [B, E]
    return chosen.shape[2] * (f * P).sum(1).mean()


def z_loss(logits):
    return logits.logsumexp(-1).square().mean()
