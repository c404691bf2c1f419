"""Wrong and unusual experts: rows sent to them, and the switch."""

from fractions import Fraction
from math import ceil, floor

import torch
import torch.nn.functional as F

from minipar.simple import dispatch as floor_dispatch
from minipar.simple import moe
from minipar.simple.autograd import all_to_all
from tests.spec.wrong.generic import LAYER, Replaced, each, fails_without_elements

dispatch = floor_dispatch.dispatch


def with_experts(change):
    """The experts' weights are given in another order, or changed."""
    return lambda comm, rows, counts, gate, up, down: dispatch(
        comm, rows, counts, *change(comm, gate, up, down)
    )


def neighbours_expert(comm, gate, up, down):
    return gate.roll(1, 0), up.roll(1, 0), down.roll(1, 0)


def detached(comm, gate, up, down):
    return gate.detach(), up, down


def equal_counts(comm, rows, counts, gate, up, down):
    """Every expert gets as many."""
    n, E = len(rows), len(counts)
    return dispatch(comm, rows, torch.tensor([n // E + (e < n % E) for e in range(E)]), gate, up, down)


def counts_in_8_bits(comm, rows, counts, gate, up, down):
    there = Replaced(comm, all_gather=lambda x: comm.all_gather(x.to(torch.uint8)).long())
    return dispatch(there, rows, counts, gate, up, down)


def sorted_by_source(comm, rows, counts, gate, up, down):
    """What arrives is taken for sorted by expert."""
    ep, own = comm.size, len(gate)
    table = comm.all_gather(counts).view(ep, ep, own)
    to_me = table[:, comm.rank]
    send, recv = table[comm.rank].sum(1).tolist(), to_me.sum(1).tolist()
    arrived = all_to_all(comm, rows, send, recv)
    parts = arrived.split(to_me.sum(0).tolist())
    done = [floor_dispatch.expert(x, gate[e], up[e], down[e]) for e, x in enumerate(parts)]
    return all_to_all(comm, torch.cat(done), recv, send)


def rows_of_one_rank_empty(comm, rows, counts, gate, up, down):
    if len(rows) == 0:
        return rows.clone()
    return dispatch(comm, rows, counts, gate, up, down)


def sorts_rows(comm, rows, counts, gate, up, down):
    """Right: every rank runs expert after expert on rows gathered into one tensor."""
    ep, own = comm.size, len(gate)
    table = comm.all_gather(counts).view(ep, ep, own)
    to_me = table[:, comm.rank]
    send, recv = table[comm.rank].sum(1).tolist(), to_me.sum(1).tolist()
    arrived = all_to_all(comm, rows, send, recv)
    of = torch.arange(own).repeat(ep).repeat_interleave(to_me.flatten())
    y = torch.zeros_like(arrived)
    for e in reversed(range(own)):
        places = (of == e).nonzero()[:, 0]
        y = y.index_copy(0, places, floor_dispatch.expert(arrived[places], gate[e], up[e], down[e]))
    return all_to_all(comm, y, recv, send)


# Switch --------------------------------------------------------------------------------


def switch(
    capacity=lambda T, E, c: ceil(Fraction(T, E) * Fraction(str(c))),
    kept=None,
    weight=lambda w: w,
    balance=moe.balance_loss,
    z=moe.z_loss,
    dropped=lambda comm, kept: int((~kept).sum()),
    choose=lambda probs: probs.max(-1),
    softmax=lambda logits: logits.softmax(-1),
    passed_on=False,
):
    """The floor's switch, one part of which is another."""

    def implementation(comm, x, router, gate, up, down, capacity_factor):
        (B, T, D), E = x.shape, len(router)
        logits = x @ router.t()
        probs = softmax(logits)
        p, choice = choose(probs)
        chosen = F.one_hot(choice, E)
        place = (chosen.cumsum(1) * chosen).sum(-1) - 1
        if kept is not None:
            keep = kept(chosen, capacity(T, E, capacity_factor))
        else:
            keep = place < min(T, capacity(T, E, capacity_factor))
        p, choice = weight(p).flatten(), choice.flatten()
        tokens = keep.flatten().nonzero()[:, 0]
        tokens = tokens[choice[tokens].argsort(stable=True)]
        counts = torch.bincount(choice[tokens], minlength=E)
        results = dispatch(comm, x.reshape(B * T, D)[tokens], counts, gate, up, down)
        y = x.new_zeros(B * T, D)
        if passed_on:
            y = x.reshape(B * T, D).clone()
        y = y.index_copy(0, tokens, results * p[tokens, None])
        return y.view(B, T, D), balance(chosen, probs), z(logits), dropped(comm, keep)

    return implementation


def last_come(chosen, capacity):
    place = (chosen.flip(1).cumsum(1).flip(1) * chosen).sum(-1) - 1
    return place < capacity


def over_the_batch(chosen, capacity):
    B, T, E = chosen.shape
    flat = chosen.reshape(1, B * T, E)
    return ((flat.cumsum(1) * flat).sum(-1) - 1 < capacity * B).view(B, T)


def balance_of_the_batch(chosen, probs):
    f, P = chosen.to(probs.dtype).mean((0, 1)), probs.mean((0, 1))
    return chosen.shape[2] * (f * P).sum()


def balance_without_E(chosen, probs):
    return moe.balance_loss(chosen, probs) / chosen.shape[2]


def balance_detached(chosen, probs):
    return moe.balance_loss(chosen, probs.detach()) + 0 * probs.sum()


def z_without_maximum(logits):
    return logits.exp().sum(-1).log().square().mean()


def z_of_means(logits):
    return logits.logsumexp(-1).mean().square()


def softmax_without_maximum(logits):
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def last_of_equals(probs):
    w, i = probs.flip(-1).max(-1)
    return w, probs.shape[-1] - 1 - i


def after(change):
    """Change (y, balance, z, dropped) of the floor's."""

    def wrong(comm, x, *args):
        return change(comm, x, *moe.switch(comm, x, *args))

    return wrong


def stale_capacity():
    kept = {}

    def capacity(T, E, c):
        return kept.setdefault(E, ceil(Fraction(T, E) * Fraction(str(c))))

    return switch(capacity=capacity)


def switch_by_loops(comm, x, router, gate, up, down, capacity_factor):
    """Right: places are counted in a loop."""

    def kept(chosen, capacity):
        out = torch.zeros(chosen.shape[:2], dtype=torch.bool)
        for b, sequence in enumerate(chosen.argmax(-1).tolist()):
            taken = {}
            for t, e in enumerate(sequence):
                taken[e] = taken.get(e, 0) + 1
                out[b, t] = taken[e] <= capacity
        return out

    return switch(kept=kept)(comm, x, router, gate, up, down, capacity_factor)


WRONG = {
    "dispatch": {
        **each(LAYER, dispatch),
        "the neighbour's expert": with_experts(neighbours_expert),
        "gate without a gradient": with_experts(detached),
        "equal counts": equal_counts,
        "counts in 8 bits": counts_in_8_bits,
        "taken for sorted by expert": sorted_by_source,
        "a rank without rows stays away": rows_of_one_rank_empty,
        "fails without rows": fails_without_elements(dispatch),
    },
    "switch": {
        "capacity rounded down": switch(capacity=lambda T, E, c: floor(Fraction(T, E) * Fraction(str(c)))),
        "capacity in floats": switch(capacity=lambda T, E, c: ceil(T / E * c)),
        "the neighbour's capacity": switch(
            capacity=lambda T, E, c: ceil(Fraction(T, E) * Fraction(str(c))) + 1
        ),
        "the last come": switch(kept=last_come),
        "capacity of the batch": switch(kept=over_the_batch),
        "capacity of the first call": stale_capacity(),
        "balance of the batch": switch(balance=balance_of_the_batch),
        "balance without E": switch(balance=balance_without_E),
        "balance without a gradient": switch(balance=balance_detached),
        "z without the maximum": switch(z=z_without_maximum),
        "z of the mean": switch(z=z_of_means),
        "softmax without the maximum": switch(softmax=softmax_without_maximum),
        "p without a gradient": switch(weight=lambda w: w.detach()),
        "dropped over all ranks": switch(dropped=lambda comm, kept: int(comm.all_reduce((~kept).sum()))),
        "dropped tokens pass": switch(passed_on=True),
        "wrong from five ranks on": after(
            lambda comm, x, y, b, z, d: (y * 2 if comm.size >= 5 else y, b, z, d)
        ),
        "zero from 1,000 elements on": after(
            lambda comm, x, y, b, z, d: (y * 0 if x.numel() >= 1000 else y, b, z, d)
        ),
        "output through float32": after(lambda comm, x, y, b, z, d: (y.float().to(y.dtype), b, z, d)),
        "wrong in float32": after(
            lambda comm, x, y, b, z, d: (y * 2 if x.dtype == torch.float32 else y, b, z, d)
        ),
    },
}
RIGHT = {
    "dispatch": {"rows sorted on arrival": sorts_rows},
    "switch": {"places in a loop": switch_by_loops, "the last of equals": switch(choose=last_of_equals)},
}
