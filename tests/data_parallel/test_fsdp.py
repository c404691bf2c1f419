"""FSDP trains as one process does: over drawn units, options, optimizers and ranks; bugs are seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.data_parallel import FSDP
from tests.data_parallel.training import (
    OPTIMIZERS,
    Case,
    Net,
    Part,
    assert_trained_as_one_process,
    drawn_cases,
    trained_on_ranks,
)
from tests.examples import examples

UNITS = {
    "all": None,
    "class": Part,
    "tuple": (Part, nn.Linear),
    "predicate": lambda m: isinstance(m, nn.Linear) and m.out_features < 100,
}


def cut_over(world, case: Case):
    """(the ranks to cut over, those with the same shard): all and none, or halves and pairs across them."""
    if case.replicas == 1 or world.size % 2:
        return world, None
    half = world.size // 2
    first = world.rank // half * half
    shard = world.subgroup(list(range(first, first + half)), f"shard {case.seed}")
    return shard, world.subgroup([world.rank % half, world.rank % half + half], f"copies {case.seed}")


def trained(world, case: Case, fsdp_cls=FSDP):
    comm, replicas = cut_over(world, case)
    net = Net(case.width, case.seed + world.rank, case.recompute)  # rank 0's parameters are what counts
    fsdp = fsdp_cls(net, comm, UNITS[case.units], case.shard_rest, case.reshard, reduce=case.reduce,
                    prefetch=case.prefetch, algorithm=case.algorithm, replicas=replicas)  # fmt: skip
    return trained_on_ranks(world, case, fsdp)


@given(
    st.integers(1, 8),
    drawn_cases(
        units=sorted(UNITS),
        shard_rest=[False, True],
        reshard=[False, True],
        prefetch=[False, True],
        no_sync=[False, True],
        optimizer=sorted(OPTIMIZERS),
        recompute=["no", "reentrant", "not reentrant"],
        algorithm=["auto", "ring", "native"],  # the tree has no reduce-scatter
        replicas=[1, 2],
    ),
)
@examples(15)
def test_fsdp_trains_as_one_process_does(size, drawn):
    results = minipar.run(
        lambda world, drawn: [trained(world, case) for case in drawn], drawn, world_size=size
    )
    for case, of_ranks in zip(drawn, zip(*results)):
        assert_trained_as_one_process(of_ranks, case, rtol=1e-9)


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
        assert_trained_as_one_process(minipar.run(trained, case, broken, world_size=2), case, rtol=1e-9)
