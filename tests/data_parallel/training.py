"""One training for the properties of DDP, ZeRO and FSDP: cases, a model that is hard for all three, batches."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from minipar.mesh import placement_of
from tests.strategies import assert_equal_to, seeds

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "adam": (torch.optim.Adam, dict(lr=0.01)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
}


class Case(NamedTuple):
    """What is drawn. From `stage` on, what only ZeRO or FSDP reads.

    no_sync   whether all backwards of a step but the last are inside it
    """

    seed: int = 3
    width: int = 5
    reduce: str = "mean"
    microbatches: int = 1
    set_to_none: bool = True
    steps: int = 2
    algorithm: str = "ring"
    bucket_mb: float = 1e-4
    optimizer: str = "sgd"
    stage: int = 2
    units: str = "tuple"
    shard_rest: bool = True
    reshard: bool = True
    prefetch: bool = True
    no_sync: bool = True
    recompute: str = "no"
    replicas: int = 1


def drawn_cases(**choices):
    """Three cases in a list, of which each field of `choices` is one of those named there."""
    fields = st.fixed_dictionaries(
        dict(
            seed=seeds,
            width=st.integers(1, 9),
            reduce=st.sampled_from(["mean", "sum"]),
            microbatches=st.integers(1, 3),
            set_to_none=st.booleans(),
            **{name: st.sampled_from(values) for name, values in choices.items()},
        )
    )
    return st.lists(fields.map(lambda drawn: Case(**drawn)), min_size=3, max_size=3)


class Part(nn.Module):
    """A unit in a unit, called twice; outputs in a dict; recomputed or not."""

    def __init__(self, width: int, recompute: str):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.own = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.recompute = recompute

    def compute(self, x):
        return torch.tanh(self.inner(torch.tanh(self.inner(x)) + self.own(x))) * self.scale

    def forward(self, x):
        if self.recompute == "no":
            return {"h": self.compute(x), "nothing": None}
        h = checkpoint(self.compute, x, use_reentrant=self.recompute == "reentrant", preserve_rng_state=False)
        return {"h": h, "nothing": None}


class Net(nn.Module):
    """All that is hard in one small model: units in units, tied, frozen, unused, used on some ranks, a buffer."""

    def __init__(self, width: int, seed: int, recompute: str = "no"):
        super().__init__()
        torch.manual_seed(seed)
        self.tied = nn.Linear(width, width, bias=False)
        self.parts = nn.ModuleList(Part(width, recompute) for _ in range(2))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 3)
        # Of no unit: all ranks run the same units.
        self.on_even_ranks = nn.Parameter(torch.randn(width, width))
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.tied.weight
        self.out = nn.Linear(width, 2 * width + 1)
        self.register_buffer("offset", torch.randn(width))
        self.to(torch.float64)

    def forward(self, x, rank: int):
        h = self.tied(x + self.offset)
        for part in self.parts:
            h = part(h)["h"]
        h = self.frozen(h)
        if rank % 2 == 0:
            h = h + h @ self.on_even_ranks
        return self.out(self.again(h)).square().mean()


def batch(case: Case, rank: int, step: int, microbatch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((case.seed, rank, step, microbatch)) % 2**31)
    return torch.randn(3, case.width, generator=generator, dtype=torch.float64)


def groups_of(net):
    """Two parameter groups with options of their own; the frozen parameter is in one of them.

    In the order of registration: so DDP and ZeRO fill the same buckets, and add in the same order.
    """
    *first, weight, bias = net.parameters()
    return [{"params": [*first, weight]}, {"params": [bias], "weight_decay": 0.0, "lr": 0.03}]


def train(case: Case, called, optimizer, ranks, seen, no_sync=nullcontext):
    """Run a plain loop with a schedule of the learning rate; return what is `seen` before every step.

    ranks   whose samples: this rank's or, in one process, all
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    history = []
    for step in range(case.steps):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for microbatch in range(case.microbatches):
            with nullcontext() if microbatch + 1 == case.microbatches else no_sync():
                for rank in ranks:
                    loss = called(batch(case, rank, step, microbatch), rank)
                    (loss / len(ranks) if case.reduce == "mean" else loss).backward()
        history.append(seen())
        optimizer.step()
        schedule.step()
    return history


def trained_on_ranks(world, case: Case, wrapped):
    """Gradients before every step, the placements of parameters, and the last state of a model under DDP or FSDP."""
    named = dict(wrapped.module.named_parameters())

    def gradients():
        for name, p in named.items():
            assert p.grad is None or (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype), name
        return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}

    cls, options = OPTIMIZERS[case.optimizer]
    no_sync = wrapped.no_sync if case.no_sync else nullcontext
    history = train(case, wrapped, cls(named.values(), **options), [world.rank], gradients, no_sync)
    state = getattr(wrapped, "full_state_dict", wrapped.module.state_dict)()
    return history, {name: placement_of(p) for name, p in named.items()}, state


def assert_trained_as_one_process(results, case: Case, rtol: float = 1e-10):
    """Compare what `trained_on_ranks` returned on every rank; `rtol` is of the last state."""
    net = Net(case.width, case.seed, case.recompute)
    cls, options = OPTIMIZERS[case.optimizer]

    def gradients():
        return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}

    want_history = train(case, net, cls(net.parameters(), **options), range(len(results)), gradients)
    for rank, (history, where, state) in enumerate(results):
        for step, (got, want) in enumerate(zip(history, want_history, strict=True)):
            assert got.keys() == want.keys(), f"rank {rank}, step {step}: {got.keys() ^ want.keys()}"
            for name in want:
                # Of this rank's part: the exact largest value is of the whole gradient.
                mine = torch.cat([got[name].reshape(-1), want[name].reshape(-1)])
                part = where[name].slice_of(want[name]).reshape(-1)
                exact = torch.cat([part, want[name].reshape(-1)])
                assert_equal_to(mine, exact, what=f"rank {rank}, step {step}, gradient of {name}")
        assert state.keys() == net.state_dict().keys()
        for name, value in net.state_dict().items():
            assert_equal_to(state[name], value, rtol, what=f"rank {rank}, {name} at the end")
