"""Wrong and unusual attention over a sequence that is divided over ranks."""

import torch

from minipar.simple import ring_attention, ulysses
from tests.spec.wrong.generic import (
    LAYER,
    each,
    float64_as_float32,
    ignores_strides,
    nan_is_zero,
    stale,
    writes_to_what_is_given,
    wrong_from_five_ranks_on,
    wrong_in_bfloat16,
    wrong_in_float32,
    zero_from_1000_elements_on,
)


def scores_of(comm, q, k, source, causal, shift=0, scale=None):
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if not causal:
        return scores
    n = q.shape[2]
    place = torch.arange(n)
    later = (source * n + place)[None, :] > (comm.rank * n + place)[:, None] + shift
    return scores.masked_fill(later, -torch.inf)


def forward(scores):
    """The floor's ring, with other scores."""

    def ring_forward(comm, q, k, v, causal=True):
        p, r = comm.size, comm.rank
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        kv = torch.stack((k, v))
        for step in range(p):
            s = scores(comm, q, kv[0], (r - step) % p, causal)
            new = torch.logaddexp(lse, s.logsumexp(3))
            out = (lse - new).exp()[..., None] * out + (s - new[..., None]).exp() @ kv[1]
            lse = new
            if step < p - 1:
                kv = ring_attention.pass_on(comm, kv)
        return out, lse

    return ring_forward


def no_running_maximum(comm, q, k, v, causal=True):
    """Numerator and denominator are added up as they are."""
    p, r = comm.size, comm.rank
    top, bottom = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    kv = torch.stack((k, v))
    for step in range(p):
        e = scores_of(comm, q, kv[0], (r - step) % p, causal).exp()
        top, bottom = top + e @ kv[1], bottom + e.sum(3)
        if step < p - 1:
            kv = ring_attention.pass_on(comm, kv)
    return top / bottom[..., None], bottom.log()


def first_blocks_maximum(comm, q, k, v, causal=True):
    """The maximum of the own block stands for all blocks."""
    p, r = comm.size, comm.rank
    top, bottom, largest = torch.zeros_like(q), q.new_zeros(q.shape[:3]), None
    kv = torch.stack((k, v))
    for step in range(p):
        s = scores_of(comm, q, kv[0], (r - step) % p, causal)
        largest = s.amax(3, keepdim=True) if largest is None else largest
        e = (s - largest).exp()
        top, bottom = top + e @ kv[1], bottom + e.sum(3)
        if step < p - 1:
            kv = ring_attention.pass_on(comm, kv)
    return top / bottom[..., None], bottom.log() + largest[..., 0]


def online(comm, q, k, v, causal=True):
    """Right: a running maximum, numerator and denominator; keys and values are sent one after the other."""
    p, r = comm.size, comm.rank
    top, bottom = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    largest = q.new_full(q.shape[:3], -torch.inf)
    for step in range(p):
        s = scores_of(comm, q, k, (r - step) % p, causal)
        new = torch.maximum(largest, s.amax(3))
        e, old = (s - new[..., None]).exp(), (largest - new).exp()
        top, bottom, largest = top * old[..., None] + e @ v, bottom * old + e.sum(3), new
        if step < p - 1:
            k, v = ring_attention.pass_on(comm, k), ring_attention.pass_on(comm, v)
    return top / bottom[..., None], bottom.log() + largest


def changed_lse(change):
    def wrong(comm, q, k, v, causal=True):
        out, lse = ring_attention.ring_forward(comm, q, k, v, causal)
        return out, change(comm, lse)

    return wrong


def always_causal(comm, q, k, v, causal=True):
    return ring_attention.ring_forward(comm, q, k, v, True)


def left_to_right(comm, q, k, v, causal=True):
    """The block of the other neighbour, from three ranks on."""
    return forward(
        lambda comm, q, k, source, causal: scores_of(comm, q, k, (2 * comm.rank - source) % comm.size, causal)
    )(comm, q, k, v, causal)


MASKS = {
    "sees one token ahead": lambda *args: scores_of(*args, shift=1),
    "does not see itself but for the first token": lambda comm, q, k, source, causal: _not_itself(
        comm, q, k, source, causal
    ),
    "not scaled": lambda *args: scores_of(*args, scale=1.0),
    "scaled for 4 features": lambda *args: scores_of(*args, scale=0.5),
    "scores up to 50": lambda comm, q, k, source, causal: _clamped(comm, q, k, source, causal),
    "not causal from 16 tokens on": lambda comm, q, k, source, causal: scores_of(
        comm, q, k, source, causal and q.shape[2] * comm.size < 16
    ),
}


def _not_itself(comm, q, k, source, causal):
    s = scores_of(comm, q, k, source, causal)
    if causal and source == comm.rank and q.shape[2] > 1:
        own = torch.eye(q.shape[2], dtype=torch.bool)
        own[0, 0] = False
        s = s.masked_fill(own, -torch.inf)
    return s


def _clamped(comm, q, k, source, causal):
    s = scores_of(comm, q, k, source, causal)
    return torch.where(s.isinf(), s, s.clamp(-50, 50))


def backward_with(change):
    """(dq, dk, dv) are changed."""

    def wrong(comm, q, k, v, out, lse, dout, causal=True):
        return change(comm, *ring_attention.ring_backward(comm, q, k, v, out, lse, dout, causal))

    return wrong


def backward_given(change):
    def wrong(comm, q, k, v, out, lse, dout, causal=True):
        return ring_attention.ring_backward(comm, *change(comm, q, k, v, out, lse, dout), causal)

    return wrong


def always_causal_back(comm, q, k, v, out, lse, dout, causal=True):
    return ring_attention.ring_backward(comm, q, k, v, out, lse, dout, True)


def softmax_again(comm, q, k, v, out, lse, dout):
    """lse of the own block alone."""
    own = scores_of(comm, q, k, comm.rank, True).logsumexp(3)
    return q, k, v, out, own, dout


def neighbours_dk(comm, dq, dk, dv):
    return dq, ring_attention.pass_on(comm, dk.contiguous()), dv


def backward_by_parts(comm, q, k, v, out, lse, dout, causal=True):
    """Right: sums in other order, dk and dv sent one after the other."""
    p, r = comm.size, comm.rank
    delta = (dout * out).sum(3, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    own = None
    for step in range(p):
        P = (scores_of(comm, q, k, (r - step) % p, causal) - lse[..., None]).exp()
        dS = P * (dout @ v.transpose(2, 3) - delta) / q.shape[3] ** 0.5
        dq = dS @ k + dq
        terms = dS.transpose(2, 3) @ q, P.transpose(2, 3) @ dout
        if step == 0:
            own = terms
        else:
            dk, dv = ring_attention.pass_on(comm, terms[0] + dk), ring_attention.pass_on(comm, terms[1] + dv)
        if step < p - 1:
            k, v = ring_attention.pass_on(comm, k), ring_attention.pass_on(comm, v)
    return dq, dk + own[0], dv + own[1]


class _Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, comm, causal, ring_forward, ring_backward):
        out, lse = ring_forward(comm, q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = comm, causal, ring_backward
        return out

    @staticmethod
    def backward(ctx, dout):
        comm, causal, ring_backward = ctx.rest
        return *ring_backward(comm, *ctx.saved_tensors, dout, causal), None, None, None, None


def attention(ring_forward=ring_attention.ring_forward, ring_backward=ring_attention.ring_backward):
    return lambda comm, q, k, v, causal=True: _Wrapped.apply(
        q, k, v, comm, causal, ring_forward, ring_backward
    )


# Ulysses --------------------------------------------------------------------------------


def ulysses_with(core):
    def wrong(comm, q, k, v, causal=True):
        qkv = ulysses.all_tokens_some_heads(comm, torch.stack((q, k, v)))
        return ulysses.some_tokens_all_heads(comm, core(comm, *qkv, causal)[None])[0]

    return wrong


def plain(comm, q, k, v, causal, shift=0, scale=None, change=lambda s: s):
    scores = change(q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale))
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + shift), -torch.inf
        )
    return scores.softmax(-1) @ v


def no_maximum(comm, q, k, v, causal):
    e = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).exp()
    if causal:
        e = e.tril()
    return e / e.sum(-1, keepdim=True) @ v


def heads_in_another_order(comm, q, k, v, causal=True):
    y = ulysses.ulysses_attention(comm, q, k, v, causal)
    H, p = y.shape[1], comm.size
    return y.view(y.shape[0], p, H // p, *y.shape[2:]).transpose(1, 2).reshape(y.shape)


def three_times(comm, q, k, v, causal=True):
    """Right: q, k, v one after the other, and softmax by hand."""
    q, k, v = (ulysses.all_tokens_some_heads(comm, x[None])[0] for x in (q, k, v))
    return ulysses.some_tokens_all_heads(comm, plain(comm, q, k, v, causal)[None])[0]


BOTH = {
    "float64 as float32": float64_as_float32,
    "zero from 1,000 elements on": zero_from_1000_elements_on,
    "wrong from five ranks on": wrong_from_five_ranks_on,
    "wrong in float32": wrong_in_float32,
    "wrong in bfloat16": wrong_in_bfloat16,
    "ignores strides": ignores_strides,
    "nan is zero": nan_is_zero,
    "stale": stale,
    "writes to what is given": writes_to_what_is_given,
}
FORWARD = {
    **{name: forward(scores) for name, scores in MASKS.items()},
    "without the maximum": no_running_maximum,
    "the own block's maximum": first_blocks_maximum,
    "always causal": always_causal,
    "the other neighbour's block": left_to_right,
}
BACKWARD = {
    "always causal": always_causal_back,
    "ignores the gradient from above": backward_given(
        lambda comm, q, k, v, out, lse, dout: (q, k, v, out, lse, torch.ones_like(dout))
    ),
    "lse of the own block": backward_given(softmax_again),
    "without delta": backward_given(lambda comm, q, k, v, out, lse, dout: (q, k, v, out * 0, lse, dout)),
    "the neighbour's dk": backward_with(neighbours_dk),
    "dq not scaled": backward_with(lambda comm, dq, dk, dv: (dq * dq.shape[3] ** 0.5, dk, dv)),
}
WRONG = {
    "ring_forward": {
        **each(BOTH, ring_attention.ring_forward),
        **FORWARD,
        "lse in another base": changed_lse(lambda comm, lse: lse / torch.log(torch.tensor(2.0))),
    },
    "ring_backward": {**each(BOTH, ring_attention.ring_backward), **BACKWARD},
    "ring_attention": {
        **each(LAYER, ring_attention.ring_attention),
        **{name: attention(f) for name, f in FORWARD.items()},
        **{f"backward: {name}": attention(ring_backward=f) for name, f in BACKWARD.items()},
    },
    "ulysses_attention": {
        **each(LAYER, ulysses.ulysses_attention),
        "not scaled": ulysses_with(lambda *args: plain(*args, scale=1.0)),
        "sees one token ahead": ulysses_with(lambda *args: plain(*args, shift=1)),
        "without the maximum": ulysses_with(no_maximum),
        "always causal": lambda comm, q, k, v, causal=True: ulysses.ulysses_attention(comm, q, k, v, True),
        "never causal": lambda comm, q, k, v, causal=True: ulysses.ulysses_attention(comm, q, k, v, False),
        "heads in another order": heads_in_another_order,
    },
}
RIGHT = {
    "ring_forward": {"a running maximum": online},
    "ring_backward": {"by parts": backward_by_parts},
    "ring_attention": {"a running maximum, by parts": attention(online, backward_by_parts)},
    "ulysses_attention": {"softmax by hand": ulysses_with(plain)},
}
