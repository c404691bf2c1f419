"""Specifications of a pipeline's step: one process's gradients, bit for bit; no more live microbatches than necessary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.training import loss_of
from minipar.spec.words import differs, generator, wrong_bytes

WIDTH, BATCH = 4, 6


def _layers(size: int, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(size)]


def _loss(output, target):
    return loss_of(output - target)


def _step(world, step: Callable, seed: int, m: int, peak: Callable, header_bytes: int) -> str | None:
    p, r = world.size, world.rank
    draw = generator(p, seed, m)
    x, target = (torch.randn(BATCH, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    stage = _layers(p, seed)[r]
    alive = [0, 0]
    stage.register_forward_hook(
        lambda *_: (alive.__setitem__(0, alive[0] + 1), alive.__setitem__(1, max(alive)), None)[2]
    )
    stage[0].weight.register_post_accumulate_grad_hook(lambda _: alive.__setitem__(0, alive[0] - 1))
    ends = x if r == 0 else None, target if r == p - 1 else None
    world.traffic.reset()
    loss = step(world, stage, _loss, *ends, m, (BATCH // m, WIDTH), torch.float64)
    act = BATCH // m * WIDTH * 8
    formula = m * act * ((r < p - 1) + (r > 0)) + header_bytes * (r < p - 1)
    sent = world.traffic.sent_bytes
    layers = nn.Sequential(*_layers(p, seed))
    want = torch.zeros((), dtype=torch.float64)
    for part, goal in zip(x.chunk(m), target.chunk(m)):
        one = _loss(layers(part), goal) / m
        one.backward()
        want += one.detach()
    what = f"rank {r}, {m} microbatches:"
    if r == p - 1 and (words := differs(f"{what} the loss", loss, want, m)):
        return words
    for (name, mine), (_, right) in zip(stage.named_parameters(), layers[r].named_parameters()):
        if words := differs(f"{what} the gradient of {name}", mine.grad, right.grad, m):
            return words
        if not torch.equal(mine.grad, right.grad):
            return f"{what} the gradient of {name} differs from one process's in rounding: add microbatches in their order"
    if words := wrong_bytes(
        sent, formula, r, p, f"{m} microbatches of {act} bytes", "one message per microbatch and way"
    ):
        return words
    if alive[1] > peak(p, r, m):
        return f"{what} {alive[1]} microbatches are alive at once; this order needs {peak(p, r, m)}"
    return None


def specification(name: str, peak: Callable[[int, int, int], int], header_bytes: int = 0) -> Specification:
    """Build one. `peak(p, rank, m)`: live microbatches allowed; `header_bytes`: sent once per boundary, for the shape."""
    body = partial(_step, peak=peak, header_bytes=header_bytes)
    stages = (
        Stage("runs", lambda f: on_ranks(partial(body, seed=0, m=1), f, sizes=(1,))),
        Stage("small", lambda f: on_ranks(partial(body, seed=1, m=2), f, sizes=(2,))),
        Stage("drawn", lambda f: next(filter(None, (_drawn(body, f, m) for m in (1, 2, 3, 6))), None)),
    )
    signature = f"{name}(comm, module, loss_fn, inputs, targets, m, shape, dtype)"
    return Specification(
        f"pipeline_{name}", signature, "The gradients of one process; the loss on the last rank.", stages
    )


def _drawn(body, implementation, m: int) -> str | None:
    return on_ranks(partial(body, seed=m, m=m), implementation)


def gpipe_peak(p: int, rank: int, m: int) -> int:
    return m


def one_f_one_b_peak(p: int, rank: int, m: int) -> int:
    return min(p - rank, m)


SPECIFICATIONS = [specification("gpipe", gpipe_peak), specification("one_f_one_b", one_f_one_b_peak)]
