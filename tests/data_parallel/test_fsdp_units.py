"""When FSDP's units are unsharded, which one comes next, and what is reduced when a backward ends."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import FSDP
from minipar.data_parallel.flat_parameters import State
from tests.strategies import assert_equal_to


def chain(num: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num))).double()


def unsharded_units(world):
    """For each of two forwards without gradients: the units that are unsharded when a layer begins."""
    model, seen = chain(4), []
    fsdp = FSDP(model, world, nn.Linear, prefetch=False)
    names = lambda: [unit.name for unit in fsdp.units for flat in unit.flats if flat.state is State.UNSHARDED]  # noqa: E731
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(names()))
    with torch.no_grad():
        for _ in range(2):
            fsdp(torch.ones(1, 4).double())
    return seen


def test_a_forward_without_gradients_holds_one_unit_at_a_time():
    for seen in minipar.run(unsharded_units, world_size=2):
        assert seen == [["0"], ["1"], ["2"], ["3"]] * 2


def test_a_backward_runs_the_units_in_the_reverse_order_of_their_ends():
    def orders(world):
        found = []
        for units in (nn.Linear, [nn.Linear]):
            fsdp = FSDP(chain(3), world, units)
            fsdp(torch.ones(1, 4).double())
            found.append(
                [[unit.name for unit in o] for o in (fsdp.order.forward_order, fsdp.order.backward_order)]
            )
        return found

    assert minipar.run(orders, world_size=1) == [[[["root", "0", "1", "2"], ["root", "2", "1", "0"]]] * 2]


class ReadsAnothersWeight(nn.Module):
    def __init__(self, in_backward):
        super().__init__()
        self.a, self.b, self.in_backward = nn.Linear(4, 4), nn.Linear(4, 4), in_backward

    def forward(self, x):
        h = self.b(self.a(x))
        if not self.in_backward:
            return h * self.a.weight.sum()
        h.register_hook(lambda grad: grad * self.a.weight.sum())
        return h.sum()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_parameter_read_while_another_unit_runs_is_named(in_backward):
    def read(world):
        fsdp = FSDP(ReadsAnothersWeight(in_backward), world, nn.Linear)
        for _ in range(1 if in_backward else 2):
            with pytest.raises(RuntimeError, match=r"a\.weight was used while unit 'a'.*is freed"):
                fsdp(torch.ones(1, 4)).backward()

    minipar.run(read, world_size=2)


class PicksALayer(nn.Module):
    """Each rank runs a layer of its own choice; the layers have equal sizes."""

    def __init__(self):
        super().__init__()
        self.layers = chain(3)

    def forward(self, x, i):
        return self.layers[2](self.layers[i](x)).sum()


def runs_its_own_layer(world, steps_together, algorithm):
    fsdp = FSDP(PicksALayer(), world, nn.Linear, algorithm=algorithm)
    for step in range(steps_together + 1):
        fsdp(torch.ones(1, 4).double(), world.rank % 2 if step == steps_together else 0).backward()


@pytest.mark.parametrize(
    ("steps_together", "algorithm"), [(0, "auto"), (0, "ring"), (5, "ring"), (0, "hierarchical")]
)
def test_ranks_that_run_different_units_are_told_which(steps_together, algorithm):
    size = 4 if algorithm == "hierarchical" else 2
    with pytest.raises(
        minipar.RankError, match=r"all_gather of unit 'layers\.[0-2]'.* of unit 'layers\.[0-2]'"
    ):
        minipar.run(runs_its_own_layer, steps_together, algorithm, world_size=size)


class SkipsABackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = chain(3)

    def forward(self, x, i):
        return sum(
            y if j == i else y.detach() for j, y in enumerate([layer(x) for layer in self.layers])
        ).sum()


def trains_its_own_layer(world):
    fsdp = FSDP(SkipsABackward(), world, nn.Linear, reshard_after_forward=False)
    fsdp(torch.ones(1, 4).double().requires_grad_(), world.rank).backward()


def test_ranks_that_reduce_different_units_are_told_which():
    with pytest.raises(minipar.RankError, match=r"reduce_scatter mean of unit 'layers\.[01]'"):
        minipar.run(trains_its_own_layer, world_size=2)


class Rest(nn.Module):
    """A unit between two layers that are in none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = chain(2)
        self.unit = nn.Sequential(nn.Linear(4, 4).double())

    def forward(self, x):
        return self.last(self.unit(self.first(x))).float().sum()


def gradients_in_half_precision(world):
    fsdp = FSDP(Rest().float(), world, nn.Sequential, shard_rest=False, compute_dtype=torch.bfloat16)
    for number in range(2):
        fsdp(torch.full((1, 4), number + 1.0)).backward()
    rest = [fsdp.module.first.weight, fsdp.module.last.weight]
    return [(p.dtype, p.grad.dtype, p.grad) for p in rest]


def test_unsharded_parameters_are_cast_to_the_compute_dtype():
    model = Rest().bfloat16()
    want = 0
    for number in range(2):
        model.zero_grad()
        model(torch.full((1, 4), number + 1.0).bfloat16()).backward()
        want = want + torch.stack([model.first.weight.grad, model.last.weight.grad]).float()
    for found in minipar.run(gradients_in_half_precision, world_size=2):
        for (dtype, grad_dtype, grad), exact in zip(found, want):
            assert (dtype, grad_dtype) == (torch.float32, torch.float32)
            assert_equal_to(grad, exact, 1e-6)
