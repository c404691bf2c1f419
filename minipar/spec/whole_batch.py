"""Specifications of two numbers of a whole batch and model: the loss over all ranks' tokens, the norm over all parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import RTOL, differs, generator, wrong_bytes

V, D = 7, 4


def _batch(size: int, seed: int) -> tuple[list, list]:
    """Return each rank's logits and targets: other numbers of tokens on each, and from seed 2 none on the last rank."""
    draw = generator(size, seed)
    logits = [torch.randn(3 + 2 * r, V, generator=draw, dtype=torch.float64) for r in range(size)]
    targets = [torch.randint(V, (len(x),), generator=draw) for x in logits]
    for r, target in enumerate(targets):
        target[: r % 3] = -100
    if seed >= 2 and size > 1:
        targets[-1].fill_(-100)
    return logits, targets


def _loss(world, global_loss, seed: int) -> str | None:
    p, r = world.size, world.rank
    logits, targets = _batch(p, seed)
    mine = logits[r].clone().requires_grad_()
    term = global_loss(world, mine, targets[r])
    if not isinstance(term, torch.Tensor) or term.shape or not term.requires_grad:
        return f"rank {r}: it returned {_kind(term)}; return this rank's term, one element that autograd can follow"
    whole = torch.cat(logits).requires_grad_()
    want = F.cross_entropy(whole, torch.cat(targets))
    total = world.all_reduce(term.detach())
    if words := differs(f"rank {r}: the sum of the ranks' terms", total, want, p):
        return words + _means(total, logits, targets)
    term.backward()
    want.backward()
    part = whole.grad.split([len(x) for x in logits])[r]
    return differs(f"rank {r}: the gradient of its logits", mine.grad, part, p, whole=whole.grad)


def _kind(x) -> str:
    return f"a tensor {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def _means(total, logits, targets) -> str:
    means = [F.cross_entropy(x, t) for x, t in zip(logits, targets) if (t != -100).any()]
    for n in (1, len(logits)):
        if torch.isclose(total, sum(means) / n, rtol=1e-9):
            return ": each rank divides by its own number of tokens; divide by that of all ranks"
    return ""


def _one_count(world, global_loss) -> str | None:
    (logits, targets), p = _batch(world.size, 1), world.size
    world.traffic.reset()
    global_loss(world.using("tree"), logits[world.rank].requires_grad_(), targets[world.rank]).backward()
    if world.traffic.sent_bytes > 8 * p:
        return (
            f"rank {world.rank}: it sent {world.traffic.sent_bytes} bytes; the count is one number of 8 bytes"
        )
    return None


def _gradients(size: int, seed: int, dtype: torch.dtype, scale: float) -> tuple[list, list, torch.Tensor]:
    """Return each rank's gradients and their copies, and the norm: a shard, a replica, and one that two ranks hold."""
    draw = generator(size, seed)
    new = lambda *shape: (scale * torch.randn(*shape, generator=draw)).to(dtype)  # noqa: E731
    shards = [new(3 if r else 0, D) for r in range(size)]
    replica, tied = new(D), new(5, D)
    last = size - 1
    grads = [[shard, replica, *([tied] if r in (0, last) else [])] for r, shard in enumerate(shards)]
    copies = [[1, size, *([1 if size == 1 else 2] if r in (0, last) else [])] for r in range(size)]
    whole = torch.cat([x.double().flatten() for x in (*shards, replica, tied)])
    return grads, copies, whole.norm()


def _norm(world, grad_norm, seed: int, dtype=torch.float64, scale: float = 1.0) -> str | None:
    r = world.rank
    grads, copies, want = _gradients(world.size, seed, dtype, scale)
    got = grad_norm(world, grads[r], copies[r])
    if not isinstance(got, torch.Tensor) or got.numel() != 1:
        return f"rank {r}: the norm is a {type(got).__name__}; return a tensor of one element"
    got = got.detach().double().reshape(())
    if words := differs(f"rank {r}: the norm", got, want, world.size, rtol=1e-6 if scale > 1 else RTOL):
        return words + _which_norm(got, grads, r)
    return None


def _which_norm(got: torch.Tensor, grads: list, rank: int) -> str:
    norms = [torch.cat([g.double().flatten() for g in mine]).norm() for mine in grads]
    every = torch.stack(norms)
    guesses = {
        "a parameter that several ranks hold was counted on each": every.norm(),
        "it is this rank's own, and has not met the others'": every[rank],
        "norms were added; add squares, and take the root at the end": every.sum(),
    }
    return "".join(f": {words}" for words, value in guesses.items() if torch.isclose(got, value, rtol=1e-9))


def _one_number(world, grad_norm) -> str | None:
    grads, copies, _ = _gradients(world.size, 1, torch.float64, 1.0)
    world.traffic.reset()
    grad_norm(world.using("ring"), grads[world.rank], copies[world.rank])
    p, r = world.size, world.rank
    flat = [1] + [0] * (p - 1)
    formula = 8 * (2 - flat[r] - flat[(r + 1) % p])
    return wrong_bytes(world.traffic.sent_bytes, formula, r, p, "any gradients", "a ring of one number")


SPECIFICATIONS = [
    Specification(
        "global_loss",
        "global_loss(comm, logits, targets)",
        "The terms of all ranks add up to the mean cross-entropy over all counted tokens; -100 does not count.",
        (
            Stage("runs", lambda f: on_ranks(_loss, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_loss, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_loss, f, 2) or on_ranks(_loss, f, 3)),
            Stage("bytes", lambda f: on_ranks(_one_count, f, sizes=(2, 4))),
        ),
    ),
    Specification(
        "grad_norm",
        "grad_norm(comm, grads, copies)",
        "The norm of the whole model's gradient: each element counts once, however many ranks hold it.",
        (
            Stage("runs", lambda f: on_ranks(_norm, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_norm, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_norm, f, 2) or on_ranks(_norm, f, 3, torch.float32, 1e25)),
            Stage("bytes", lambda f: on_ranks(_one_number, f, sizes=(3, 4))),
        ),
    ),
]
