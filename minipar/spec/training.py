"""Models trained on ranks beside one process, by one runner, for the specifications of DDP, ZeRO and FSDP.

Two models are trained in turn, part by part, so that what one of them keeps is not the other's; between steps they do what
users do: forget gradients without a step, evaluate under no_grad, accumulate two backwards, freeze, tie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.counted import counted
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Body, Stage, every
from minipar.spec.varied import BFLOAT16, FLOAT32, LARGE, NAN, PLAIN, Kind
from minipar.spec.words import first, generator, grad_of, in_words, mismatch, normal

Options = Mapping[str, Any]


class Trainee(NamedTuple):
    """A model as a specification trains it.

    forward    from x to the output
    optimizer  with zero_grad() and step()
    alike      what is to be one process's on every rank: "gradients" (and parameters, buffers), "parameters", or "" where
               they are `shards`, of whose gradients only the norm over all ranks is seen
    finish     to be called after a backward
    """

    forward: Callable[[Tensor], Tensor]
    optimizer: Any
    alike: Literal["gradients", "parameters", ""] = "gradients"
    finish: Callable[[], None] = lambda: None
    shards: Sequence[Tensor] = ()


# (implementation, module, comm, optimizer_cls, options)
Start = Callable[[Implementation, nn.Module, Comm, Any, Options], Trainee]


class Net(nn.Module):
    """Three layers, the middle one used twice, and a buffer."""

    offset: Tensor

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.last = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.register_buffer("offset", torch.randn(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x + self.offset))
        y: Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.tied(h)))))
        return y


class Mixed(nn.Module):
    """Parameters of one to thousands of elements, one not contiguous, one in two layers; a buffer of a huge integer."""

    count: Tensor

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.large = nn.Linear(4, 48), nn.Linear(48, 48, bias=False)
        self.again = nn.Linear(48, 48)
        self.again.weight = self.large.weight
        self.turned = nn.Parameter(torch.randn(3, 48).t())
        self.scale = nn.Parameter(1 + torch.rand(()))
        self.register_buffer("count", torch.tensor(2**53 + 1 + 2 * seed))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again(torch.tanh(self.large(torch.tanh(self.first(x))))))
        return h @ self.turned * self.scale


class Branches(nn.Module):
    """Four layers side by side, run in an order that depends on the seed, so that ranks' gradients have other orders."""

    bucket_mb = 4 * 5 * 8 / 2**20  # a bucket for each layer

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
        self.turn = 1 if seed % 2 else -1

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(layer(x)) for layer in list(self.layers)[:: self.turn])  # type: ignore[return-value]


class Scaled(nn.Module):
    """A layer whose parameters are in the order in which their gradients come."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(width))
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) * self.scale


def frozen(seed: int) -> nn.Module:
    """Return a Net one of whose parameters is not trained."""
    net = Net(seed)
    net.first.weight.requires_grad_(False)
    return net


def chain(
    seed: int, width: int = 5, depth: int = 4, layer: Callable[[int], nn.Module] | None = None
) -> nn.Sequential:
    """Return a chain of layers, linear ones if not given, each an FSDP unit."""
    torch.manual_seed(seed)
    return nn.Sequential(*(layer(width) if layer else nn.Linear(width, width) for _ in range(depth))).double()


def samples(rank: int, step: int, width: int) -> Tensor:
    """Return `rank`'s part of a step's batch."""
    return normal(generator(rank, step, width), 3, width)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


# What is done between steps, in parts.
MOVES = {
    "train": ("forget", "forward", "backward", "step"),
    "leave": ("forget", "forward", "backward"),  # without a step
    "twice": ("forget", "forward", "backward", "forward", "backward", "step"),
    "look": ("look",),  # under no_grad
}
DRAWN = ("train", "leave", "train", "look", "twice", "train")
SGD = (torch.optim.SGD, {"lr": 0.03})
OPTIMIZERS = (
    SGD,  # first, since Adam hides a wrong factor
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
)
# A step larger than the parameters, so that a gradient's error is not lost in their rounding.
LARGE_STEP = (torch.optim.SGD, {"lr": 10.0})


class Beside:
    """A model on ranks, which begin with different parameters, and the same in one process, which begins with rank 0's."""

    def __init__(
        self,
        world: Comm,
        implementation: Implementation,
        start: Start,
        make: Callable[[int], nn.Module],
        seed: int,
        width: int,
        optimizer: tuple[Any, Options],
        kind: Kind,
    ):
        self.world, self.width, self.kind, (cls, options) = world, width, kind, optimizer
        self.net = make(seed + world.rank).to(kind.dtype)
        self.model = make(seed).to(kind.dtype).double()
        self.trainee = start(implementation, self.net, world, cls, options)
        if self.trainee.alike == "parameters":  # buffers are no optimizer's
            for mine, rank_0s in zip(self.net.buffers(), self.model.buffers()):
                mine.copy_(rank_0s)
        self.one = cls([p for p in self.model.parameters() if p.requires_grad], **options)
        self.cls, self.steps, self.forwards, self.backwards = cls.__name__, 0, 0, 0

    def begin(self) -> str | None:
        """Compare what each rank begins with."""
        wanted = self.model.state_dict()
        for name, x in self.net.state_dict().items() if self.trainee.alike else ():
            if not torch.equal(x, wanted[name].to(x.dtype)):
                return f"{name} does not start with rank 0's values: copy them to all ranks (comm.broadcast)"
        return None

    def forget(self) -> None:
        self.trainee.optimizer.zero_grad()
        self.one.zero_grad()
        self.backwards = 0

    def forward(self) -> str | None:
        """Compare the outputs of every rank's own samples."""
        p, r = self.world.size, self.world.rank
        xs = [self.kind.rounded(samples(s, self.forwards, self.width)) for s in range(p)]
        if self.forwards:
            xs[0] = self.kind.with_nan(xs[0])
        self.x, self.xs = self.kind.given(xs[r], True), [x.requires_grad_() for x in xs]
        self.out, self.outs = self.trainee.forward(self.x), [self.model(x) for x in self.xs]
        self.forwards += 1
        words = self.kind.mismatch(f"the output of forward {self.forwards - 1}", self.out, self.outs[r], p)
        hint = (
            ": rank 0's parameters should be everybody's; broadcast them in __init__"
            if self.forwards == 1
            else ""
        )
        return words and words + hint

    def look(self) -> str | None:
        with torch.no_grad():
            words = self.forward()
        return words and f"{words}: under no_grad, between steps"

    def backward(self) -> str | None:
        """Compare the gradients, of a loss that is not the last function."""
        p, r, forward = self.world.size, self.world.rank, self.forwards - 1
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "grad and param do not obey"
            )  # the layout of a gradient is not asked for
            (3 * loss_of(self.out)).backward()
            self.trainee.finish()
        for out in self.outs:
            (3 * loss_of(out) / p).backward()
        self.backwards += 1
        wanted = dict(self.model.named_parameters())
        mine = reversed(list(self.net.named_parameters())) if self.trainee.alike == "gradients" else ()
        for name, w in mine:  # in the order of the backward
            what = f"the gradient of {name} {list(w.shape)} in step {self.steps}, backward {self.backwards}"
            if words := self.kind.mismatch(what, w.grad, wanted[name].grad, p):
                return words
        if self.trainee.shards:
            squares = self.world.all_reduce(_squares(w.grad for w in self.trainee.shards))
            want = _squares(w.grad for w in self.model.parameters())
            what = f"the gradient's length, over all shards, in step {self.steps}"
            if words := self.kind.mismatch(what, squares.sqrt().to(self.kind.dtype), want.sqrt(), p):
                return words
        if self.kind.nan or self.trainee.alike == "parameters":
            return None
        what = f"the gradient of the module's input, in forward {forward}"
        return self.kind.mismatch(what, self.x.grad, grad_of(self.xs[r]) * p, p)

    def step(self) -> str | None:
        """Compare the parameters or, where rounding allows, their change: its factor says that a sum stands for a mean."""
        before = {name: w.detach().clone() for name, w in self.model.named_parameters()}
        self.trainee.optimizer.step()
        self.one.step()
        self.steps += 1
        taken = "1 step" if self.steps == 1 else f"{self.steps} steps"
        taken = "two backwards and a step" if self.backwards == 2 else taken
        wanted, exact = dict(self.model.named_parameters()), self.kind.dtype == torch.float64
        for name, w in self.net.named_parameters() if self.trainee.alike else ():
            what = f"{'the change of ' if exact else ''}{name} {list(w.shape)} after {taken} of {self.cls}"
            got, want = (w - before[name], wanted[name] - before[name]) if exact else (w, wanted[name])
            if (
                words := mismatch(what, got, want, self.world.size, 1e-9)
                if exact
                else self.kind.mismatch(what, got, want)
            ):
                return words
        return None


def trains(
    world: Comm,
    implementation: Implementation,
    start: Start,
    makes: Sequence[Callable[[int], nn.Module]] = (Net,),
    moves: Sequence[str] = ("train",),
    optimizer: tuple[Any, Options] = SGD,
    kind: Kind = PLAIN,
    seed: int = 0,
    width: int = 4,
) -> str | None:
    """Train one model of each of `makes`, all of them in turn."""
    several = [
        Beside(world, implementation, start, make, seed + 3 * n, width, optimizer, kind)
        for n, make in enumerate(makes)
    ]
    for part in ("begin", *(part for move in moves for part in MOVES[move])):
        for number, one in enumerate(several, 1):
            if words := getattr(one, part)():
                of = f": model {number} of {len(several)}, trained in turn" if len(several) > 1 else ""
                return f"{words}{of}"
    return None


def or_refused(*args: Any, **options: Any) -> str | None:
    """Train, as `trains` does; an exception is as good as right results."""
    with suppress(ValueError, RuntimeError, TypeError, AttributeError, AssertionError, LookupError):
        return trains(*args, **options)
    return None


def varied(
    world: Comm,
    implementation: Implementation,
    start: Start,
    make: Callable[[int], nn.Module],
    width: int = 4,
    looks: Sequence[str] = (),
) -> str | None:
    """Train a model of thousands of elements, in other dtypes, and with a nan; `looks`: moves at the end."""
    train = partial(trains, world, implementation, start, (make,), seed=9, width=width)
    low = ("twice", *looks)
    moves = {LARGE: ("train", "train"), FLOAT32: low, BFLOAT16: low, NAN: ("twice",)}
    return first(train(moves=m, optimizer=LARGE_STEP, kind=kind) for kind, m in moves.items())


def _squares(grads: Iterable[Tensor | None]) -> Tensor:
    total = sum(g.double().square().sum().item() for g in grads if g is not None)
    return torch.tensor([total], dtype=torch.float64)


def tied(seed: int) -> nn.Module:
    """Return a chain of wide layers, two of which share their weight."""
    net = chain(seed, width=64, depth=5)
    net[4].weight = net[3].weight
    return net


def reduced_bytes(world: Comm, implementation: Implementation, start: Start) -> str | None:
    """Check that a backward and a step send each gradient twice (p-1)/p times, one that two layers share once."""
    net, p = tied(0), world.size
    trainee = start(implementation, net, world.using("ring"), *SGD)
    num_bytes = sum(w.nbytes for w in net.parameters())
    with counted(world) as sent:
        loss_of(trainee.forward(torch.ones(2, 64, dtype=torch.float64))).backward()
        trainee.finish()
        trainee.optimizer.step()
    formula = 2 * (p - 1) / p * num_bytes
    if abs(sent.sent_bytes - formula) > 0.02 * formula + 64 * p:  # parts may be padded
        return (
            f"{p} ranks, {num_bytes} bytes of parameters: it sent {in_words(sent)}; averaging sends "
            f"2(p-1)/p of them, by a reduce-scatter and an all-gather, {formula:.0f}"
        )
    return None


def stages(
    start: Start,
    *more: Body,
    optimizers: Sequence[tuple[Any, Options]] = (SGD,),
    between: Sequence[Stage] = (),
) -> tuple[Stage, ...]:
    """Return the stages of what trains as one process does and sends as averaging does.

    more     bodies of the drawn cases
    between  stages before "varied"
    """
    train = partial(trains, start=start)
    drawn = [partial(train, makes=(Net, Mixed), moves=DRAWN, optimizer=one, seed=2) for one in optimizers]
    return (
        Stage("runs", train, (1,)),
        Stage("small", partial(train, seed=1), (2,)),
        Stage("drawn", every(*drawn, *more)),
        Stage("bytes", partial(reduced_bytes, start=start), (3, 4)),
        *between,
        Stage("varied", partial(varied, start=start, make=Mixed), (2, 5)),
    )
