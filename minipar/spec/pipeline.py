"""Specifications of a pipeline's step: one process's gradients bit for bit, and no more live microbatches than needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.from_file import FromFile, Implementation
from minipar.spec.specification import Body, Specification, Stage, on_ranks
from minipar.spec.training import loss_of
from minipar.spec.varied import AGAIN, KINDS, RANKS
from minipar.spec.words import generator, grad_of, mismatch, normal, wrong_bytes

Peak = Callable[[int, int, int], int]  # (p, rank, m) -> live microbatches

WIDTH, BATCH = 4, 6


def _layers(size: int, seed: int, dtype: torch.dtype = torch.float64) -> list[nn.Sequential]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype) for _ in range(size)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output - target)


def _step(world: Comm, step: Implementation, seed: int, m: int, peak: Peak, header_bytes: int) -> str | None:
    p, r = world.size, world.rank
    draw = generator(p, seed, m)
    x, target = (normal(draw, BATCH, WIDTH) for _ in range(2))
    stage = _layers(p, seed)[r]
    changes: list[int] = []  # +1 or -1 for each microbatch that becomes live or ends
    stage.register_forward_hook(lambda *_: changes.append(1))
    stage[0].get_parameter("weight").register_post_accumulate_grad_hook(lambda _: changes.append(-1))
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
    if r == p - 1 and (words := mismatch(f"{what} the loss", loss, want, m)):
        return words
    for (name, mine), (_, right) in zip(stage.named_parameters(), layers[r].named_parameters()):
        if words := mismatch(f"{what} the gradient of {name}", mine.grad, right.grad, m):
            return words
        if not torch.equal(grad_of(mine), grad_of(right)):
            return f"{what} the gradient of {name} differs from one process's in rounding: add microbatches in their order"
    if words := wrong_bytes(
        sent, formula, r, p, f"{m} microbatches of {act} bytes", "one message per microbatch and way"
    ):
        return words
    if (alive := max(accumulate(changes))) > peak(p, r, m):
        return f"{what} {alive} microbatches are alive at once; this order needs {peak(p, r, m)}"
    return None


def _varied(world: Comm, step: Implementation) -> str | None:
    """Check two steps that accumulate gradients, with many microbatches, in several dtypes, strides and values."""
    p, r, m = world.size, world.rank, 9
    for kind in (kind for kind in KINDS if kind is not AGAIN):
        rows = (2 if not kind.large else 300) * m
        stages, one = (_layers(p, 7, kind.dtype) for _ in range(2))
        layers = nn.Sequential(*one)
        for again in range(2):
            draw = generator(p, 7, again)
            x, target = (kind.given(normal(draw, rows, WIDTH)) for _ in range(2))
            if kind.nan and again:
                x[0, 0] = torch.nan
            given = x.clone() if r == 0 else None, target.clone() if r == p - 1 else None
            if kind.strided:
                given = x if r == 0 else None, target if r == p - 1 else None
            x, target = x.clone(), target.clone()
            loss = step(world, stages[r], _loss, *given, m, (rows // m, WIDTH), kind.dtype)
            want = torch.zeros((), dtype=kind.dtype)
            for part, goal in zip(x.chunk(m), target.chunk(m)):
                term = _loss(layers(part), goal) / m
                term.backward()
                want += term.detach()
            what = f"rank {r}, {m} microbatches of {rows // m} rows{', step 2' if again else ''}:"
            if words := kind.mismatch(f"{what} the loss", loss, want if r == p - 1 else None, m):
                return words
            for (name, mine), (_, right) in zip(stages[r].named_parameters(), one[r].named_parameters()):
                if words := kind.mismatch(f"{what} the gradient of {name}", mine.grad, right.grad, m):
                    return words + (": add to the .grad that is there" if again else "")
            for name, now, before in zip(("inputs", "targets"), given, (x, target)):
                if now is not None and (words := kind.written(f"{what} {name}", now, before)):
                    return words
    return None


def specification(name: str, peak: Peak, header_bytes: int = 0) -> Specification:
    """Return the specification of a step.

    peak          the largest number of live microbatches allowed
    header_bytes  bytes sent once per stage boundary, for the shape
    """
    body = partial(_step, peak=peak, header_bytes=header_bytes)
    stages = (
        Stage("runs", lambda f: on_ranks(partial(body, seed=0, m=1), f, sizes=(1,))),
        Stage("small", lambda f: on_ranks(partial(body, seed=1, m=2), f, sizes=(2,))),
        Stage("drawn", lambda f: next(filter(None, (_drawn(body, f, m) for m in (1, 2, 3, 6))), None)),
        Stage("varied", lambda f: on_ranks(_varied, f, sizes=RANKS)),
    )
    signature = f"{name}(comm, module, loss_fn, inputs, targets, m, shape, dtype)"
    return Specification(
        f"pipeline_{name}", signature, "The gradients of one process; the loss on the last rank.", stages
    )


def _drawn(body: Body, implementation: Implementation | FromFile, m: int) -> str | None:
    return on_ranks(partial(body, seed=m, m=m), implementation)


def gpipe_peak(p: int, rank: int, m: int) -> int:
    return m


def one_f_one_b_peak(p: int, rank: int, m: int) -> int:
    return min(p - rank, m)


SPECIFICATIONS = [specification("gpipe", gpipe_peak), specification("one_f_one_b", one_f_one_b_peak)]
