"""FSDP trains as one process does: over drawn units, options, optimizers and ranks; bugs are seen."""

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import minipar
from minipar.data_parallel import FSDP
from minipar.mesh import placement_of
from tests.data_parallel.test_zero import OPTIMIZERS
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds


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
    """Everything that is hard for FSDP: nested units, tied across units, frozen, unused, used on some ranks, a buffer."""

    def __init__(self, width: int, seed: int, recompute: str = "no"):
        super().__init__()
        torch.manual_seed(seed)
        self.tied = nn.Linear(width, width, bias=False)
        self.parts = nn.ModuleList(Part(width, recompute) for _ in range(2))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 3)
        self.on_even_ranks = nn.Parameter(
            torch.randn(width, width)
        )  # of no unit: all ranks run the same units
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


UNITS = {
    "all": None,
    "class": Part,
    "tuple": (Part, nn.Linear),
    "predicate": lambda m: isinstance(m, nn.Linear) and m.out_features < 100,
}


class Case(NamedTuple):
    seed: int = 3
    width: int = 5
    units: str = "tuple"
    shard_rest: bool = True
    reshard: bool = True
    prefetch: bool = True
    reduce: str = "mean"
    microbatches: int = 1
    no_sync: bool = True
    optimizer: str = "sgd"
    recompute: str = "no"
    algorithm: str = "ring"
    replicas: int = 1
    steps: int = 2


cases = st.builds(
    Case,
    seed=seeds,
    width=st.integers(1, 9),
    units=st.sampled_from(sorted(UNITS)),
    shard_rest=st.booleans(),
    reshard=st.booleans(),
    prefetch=st.booleans(),
    reduce=st.sampled_from(["mean", "sum"]),
    microbatches=st.integers(1, 3),
    no_sync=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    recompute=st.sampled_from(["no", "reentrant", "not reentrant"]),
    algorithm=st.sampled_from(["auto", "ring", "native"]),  # the tree has no reduce-scatter
    replicas=st.sampled_from([1, 2]),
    steps=st.just(2),  # else drawn too
)


def batch(case: Case, rank: int, step: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((case.seed, rank, step, microbatch)) % 2**31)
    return torch.randn(3, case.width, generator=generator, dtype=torch.float64)


def cut_over(world, case: Case):
    """(the ranks to cut over, those with the same shard): all and none, or halves and pairs across them."""
    if case.replicas == 1 or world.size % 2:
        return world, None
    half = world.size // 2
    first = world.rank // half * half
    shard = world.subgroup(list(range(first, first + half)), f"shard {case.seed}")
    return shard, world.subgroup([world.rank % half, world.rank % half + half], f"copies {case.seed}")


def wrapped(world, case: Case, fsdp_cls=FSDP, **more):
    comm, replicas = cut_over(world, case)
    net = Net(case.width, case.seed + world.rank, case.recompute)  # rank 0's parameters are what counts
    return fsdp_cls(net, comm, UNITS[case.units], case.shard_rest, case.reshard, reduce=case.reduce,
                    prefetch=case.prefetch, algorithm=case.algorithm, replicas=replicas, **more)  # fmt: skip


def train_on_ranks(world, case: Case, fsdp_cls=FSDP):
    fsdp = wrapped(world, case, fsdp_cls)
    optimizer_cls, options = OPTIMIZERS[case.optimizer]
    optimizer = optimizer_cls(fsdp.parameters(), **options)
    history = []
    for step in range(case.steps):
        optimizer.zero_grad()
        for microbatch in range(case.microbatches):
            last = microbatch == case.microbatches - 1
            with fsdp.no_sync() if case.no_sync and not last else nullcontext():
                fsdp(batch(case, world.rank, step, microbatch), world.rank).backward()
        gradients = {}
        for name, p in fsdp.module.named_parameters():
            if p.grad is not None:
                assert (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype), name
                gradients[name] = p.grad.clone()
        optimizer.step()
        history.append(gradients)
    where = {name: placement_of(p) for name, p in fsdp.module.named_parameters()}
    return history, where, fsdp.full_state_dict()


def train_in_one_process(case: Case, size: int):
    net = Net(case.width, case.seed, case.recompute)
    optimizer_cls, options = OPTIMIZERS[case.optimizer]
    optimizer = optimizer_cls(net.parameters(), **options)
    history = []
    for step in range(case.steps):
        optimizer.zero_grad()
        for microbatch in range(case.microbatches):
            for rank in range(size):
                loss = net(batch(case, rank, step, microbatch), rank)
                (loss / size if case.reduce == "mean" else loss).backward()
        history.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    return history, net.state_dict()


def assert_same_training(results, case: Case):
    want_history, want_state = train_in_one_process(case, len(results))
    for rank, (history, where, state) in enumerate(results):
        for step, (got, want) in enumerate(zip(history, want_history)):
            assert got.keys() == want.keys(), f"rank {rank}, step {step}: {got.keys() ^ want.keys()}"
            for name in want:
                # Of this rank's part: the exact largest value is of the whole gradient.
                mine = torch.cat([got[name].reshape(-1), want[name].reshape(-1)])
                part = where[name].slice_of(want[name]).reshape(-1)
                exact = torch.cat([part, want[name].reshape(-1)])
                assert_equal_to(mine, exact, what=f"rank {rank}, step {step}, gradient of {name}")
        assert state.keys() == want_state.keys()
        for name in want_state:
            assert_equal_to(state[name], want_state[name], rtol=1e-9, what=f"rank {rank}, {name} at the end")


@given(st.integers(1, 8), st.lists(cases, min_size=3, max_size=3))
@examples(15)
def test_fsdp_trains_as_one_process_does(size, drawn):
    results = minipar.run(
        lambda world, drawn: [train_on_ranks(world, case) for case in drawn],
        drawn,
        world_size=size,
    )
    for i, case in enumerate(drawn):
        assert_same_training([r[i] for r in results], case)


class TrustsWhatItGathered(FSDP):
    """What was gathered ahead for the last step is used in the next, though the optimizer has stepped."""

    def _begin_forward(self):
        self.order.begin()


class GathersAheadForTheNextStep(FSDP):
    """At the end of a backward the first unit of the next forward is gathered: before the optimizer steps."""

    def _finish(self):
        super()._finish()
        self.units[0].unshard()

    _begin_forward = TrustsWhatItGathered._begin_forward


class NeverReshards(FSDP):
    """A unit that stays whole: right numbers, wrong memory (and stale at the next step)."""

    def _before_forward(self, unit, *call):
        for flat in self.units[-1].flats:
            flat.reshard = flat.use_sharded
        return super()._before_forward(unit, *call)


class ForgetsAReduce(FSDP):
    def _after_backward(self, unit):
        if unit is self.units[-1]:
            for gradients in unit.gradients:
                gradients.discard()
        super()._after_backward(unit)


class DividesTwice(FSDP):
    def _finish(self):
        super()._finish()
        for param in self.parameters():
            if param.grad is not None:
                param.grad /= self.units[0].flats[0].comm.size


class CutsOutTheWrongPart(FSDP):
    """The gradient of a neighbour's chunk."""

    def _finish(self):
        for gradients in self.reducer.gradients:
            gradients._keep = lambda chunk, keep=gradients._keep: keep(chunk.roll(1))
        super()._finish()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "broken", [GathersAheadForTheNextStep, NeverReshards, ForgetsAReduce, DividesTwice, CutsOutTheWrongPart]
)
def test_real_bugs_are_seen(broken):
    case = Case(steps=3)
    with pytest.raises((AssertionError, minipar.RankError)):
        assert_same_training(minipar.run(train_on_ranks, case, broken, world_size=2), case)
