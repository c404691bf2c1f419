"""Specifications of a pipeline's step: one process's gradients bit for bit, and no more live microbatches than needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.convention import stated
from minipar.spec.counted import counted
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, every
from minipar.spec.training import loss_of
from minipar.spec.varied import AGAIN, KINDS, PLAIN, Kind
from minipar.spec.words import generator, grad_of, normal, wrong_bytes
from minipar.support.live_bytes import LiveBytes, exists

Peak = Callable[[int, int, int], int]  # (p, rank, m) -> live microbatches

HEADER_BYTES = 256  # may be sent to neighbours by an implementation that states so
WIDTH, BATCH, VOCAB = 4, 6, 7
TOKENS = Kind("of tokens")


class _Turned(nn.Module):
    """The identity, whose result is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


def _layers(
    size: int, seed: int, kind: Kind = PLAIN, depth: int = 1, turned: bool = False
) -> list[nn.Sequential]:
    """Return each rank's stage, whose results are not contiguous if `turned`."""
    torch.manual_seed(seed)
    layers = [
        [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())] for _ in range(size)
    ]
    first: list[nn.Module] = [nn.Embedding(VOCAB, WIDTH)] if kind == TOKENS else []
    last: list[nn.Module] = [_Turned()] if turned else []
    return [
        nn.Sequential(*([] if r else first), *mine, *last).to(kind.dtype) for r, mine in enumerate(layers)
    ]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output - target)


def _beside(
    world: Comm,
    step: Implementation,
    stages: list[nn.Sequential],
    one: list[nn.Sequential],
    batch: tuple[Tensor, Tensor],
    m: int,
    kind: Kind = PLAIN,
    words: str = "",
) -> str | None:
    """Take a step with this rank's stage, and compare the loss and the gradients with one process's, of all stages."""
    p, r, (x, target) = world.size, world.rank, batch
    given = x if r == 0 else None, target if r == p - 1 else None
    loss = step(world, stages[r], _loss, *given, m, (len(x) // m, WIDTH), kind.dtype)
    want = torch.zeros((), dtype=kind.dtype)
    for part, goal in zip(x.chunk(m), target.chunk(m)):
        term = _loss(nn.Sequential(*one)(part), goal) / m
        term.backward()
        want += term.detach()
    what = f"rank {r}, {m} microbatches of {len(x) // m} rows{words}:"
    if wrong := kind.mismatch(f"{what} the loss", loss, want if r == p - 1 else None, m):
        return wrong
    for (name, mine), right in zip(stages[r].named_parameters(), one[r].parameters()):
        if wrong := kind.mismatch(f"{what} the gradient of {name}", mine.grad, right.grad, m):
            return wrong
    return None


def _step(world: Comm, step: Implementation, seed: int, m: int, peak: Peak, header_bytes: int) -> str | None:
    p, r = world.size, world.rank
    if m < p and "p microbatches or more" in stated(step):
        return None
    draw = generator(p, seed, m)
    x, target = (normal(draw, BATCH, WIDTH) for _ in range(2))
    stages, one = _layers(p, seed), _layers(p, seed)
    stage = stages[r]
    changes: list[int] = []  # +1 or -1 for each microbatch that becomes live or ends
    # A pass on fake tensors, to learn a shape, makes nothing alive.
    stage.register_forward_hook(
        lambda *call: changes.extend([1] if exists(call[2].untyped_storage()) else [])
    )
    stage[0].get_parameter("weight").register_post_accumulate_grad_hook(lambda _: changes.append(-1))
    with counted(world) as sent:
        if words := _beside(world, step, stages, one, (x, target), m):
            return words
    what = f"rank {r}, {m} microbatches:"
    for (name, mine), right in zip(stage.named_parameters(), one[r].parameters()):
        if not torch.equal(grad_of(mine), grad_of(right)):
            return f"{what} the gradient of {name} differs from one process's in rounding: add microbatches in their order"
    act = BATCH // m * WIDTH * 8
    formula = m * act * ((r < p - 1) + (r > 0)) + header_bytes * (r < p - 1)
    more = "header" in stated(step) and 0 <= sent.sent_bytes - formula <= HEADER_BYTES
    if not more and (
        words := wrong_bytes(
            sent, formula, p, f"{m} microbatches of {act} bytes", "one message per microbatch and way"
        )
    ):
        return words
    if (alive := max(accumulate(changes))) > peak(p, r, m):
        return f"{what} {alive} microbatches are alive at once; this order needs {peak(p, r, m)}"
    ends_at = [i for i, change in enumerate(changes) if change < 0]
    for k, i in enumerate(ends_at):
        if (alive := sum(changes[:i])) < (due := peak(p, r, m - k)):
            return f"{what} {alive} microbatches are alive before backward {k} ends, {due} in this order: other ranks wait"
    return None


def _memory(world: Comm, step: Implementation, peak: Peak) -> str | None:
    """Check that what is allocated at once does not grow with the number of microbatches, if those alive do not."""
    p, r, rows = world.size, world.rank, 64
    peaks = []
    for m in (p, 3 * p):
        stage, x = _layers(p, 1, depth=8)[r], torch.ones(rows * m, WIDTH, dtype=torch.float64)
        ends = x if r == 0 else None, x if r == p - 1 else None
        with LiveBytes() as live:
            step(world, stage, _loss, *ends, m, (rows, WIDTH), torch.float64)
        peaks.append(live.peak)
    if peaks[1] > 2 * peaks[0] * peak(p, r, 3 * p) / peak(p, r, p):
        return (
            f"with {3 * p} microbatches {peaks[1]} bytes are allocated, with {p} {peaks[0]}: is a graph kept?"
        )
    return None


def _varied(world: Comm, step: Implementation) -> str | None:
    """Check two steps that accumulate gradients, with many microbatches, in several dtypes, strides and values."""
    p, m = world.size, 9
    for kind in (*KINDS, TOKENS):
        if kind == AGAIN:
            continue
        turned = kind.strided and "contiguous" not in stated(step)
        rows = (2 if not kind.large else 300) * m
        stages, one = (_layers(p, 7, kind, turned=turned) for _ in range(2))
        for again in range(2):
            draw = generator(p, 7, again)
            x, target = (kind.given(normal(draw, rows, WIDTH)) for _ in range(2))
            if kind == TOKENS:
                x = torch.randint(VOCAB, (rows,), generator=draw)
            if kind.nan and again:
                x[0, 0] = torch.nan
            if words := _beside(world, step, stages, one, (x, target), m, kind, ", step 2" * again):
                return words + ": add to the .grad that is there" * again
    return None


def specification(name: str, peak: Peak, header_bytes: int = 0) -> Specification:
    """Return the specification of a step.

    peak          the largest number of live microbatches allowed
    header_bytes  bytes sent once per stage boundary, for the shape
    """
    body = partial(_step, peak=peak, header_bytes=header_bytes)
    stages = (
        Stage("runs", partial(body, seed=0, m=1), (1,)),
        Stage("small", partial(body, seed=1, m=2), (2,)),
        Stage("drawn", every(*(partial(body, seed=m, m=m) for m in (1, 2, 3, 6)))),
        Stage("memory", partial(_memory, peak=peak), (2, 3)),
        Stage("varied", _varied, (2, 5)),
    )
    signature = f"{name}(comm, module, loss_fn, inputs, targets, m, shape, dtype)"
    return Specification(
        f"pipeline_{name}",
        signature,
        "The gradients of one process; the loss on the last rank; the order that its name says.",
        stages,
        ("header", "p microbatches or more", "contiguous"),
    )


def gpipe_peak(p: int, rank: int, m: int) -> int:
    return m


def one_f_one_b_peak(p: int, rank: int, m: int) -> int:
    return min(p - rank, m)


SPECIFICATIONS = [specification("gpipe", gpipe_peak), specification("one_f_one_b", one_f_one_b_peak)]
