"""Column- and row-parallel layers, alone and in pairs, are the linear layers they were cut from."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.comm import autograd
from minipar.mesh import gather, placement_of
from minipar.model.deferrable_linear import Linear, WeightGradients, linear
from minipar.tensor_parallel import ColumnParallelLinear, RowParallelLinear, ShardedWeight, column_parallel
from minipar.tensor_parallel import column as module
from minipar.tensor_parallel.parallel_linear import sum_together
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds, world_sizes


class Layer(NamedTuple):
    """A linear layer and its input; features in multiples of tp."""

    tp: int
    batch: int
    tokens: int
    inputs: int
    outputs: int
    bias: bool
    kind: type
    seed: int

    def make(self):
        torch.manual_seed(self.seed)
        layer = self.kind(self.tp * self.inputs, self.tp * self.outputs, bias=self.bias)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(self.batch, self.tp * self.tokens, self.tp * self.inputs)
        dy = torch.randn(self.batch, self.tp * self.tokens, self.tp * self.outputs)
        return layer.double(), x.double().requires_grad_(), dy.double()


sides = st.integers(1, 4)
layers = st.builds(
    Layer, world_sizes, st.integers(1, 2), st.integers(1, 2), sides, sides, st.booleans(),
    st.sampled_from([nn.Linear, Linear]), seeds,
)  # fmt: skip


def part(world, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.detach().chunk(world.size, dim)[world.rank]


def oracle(layer, x, dy):
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def assert_parameters(cut, gradients) -> None:
    for name, parameter in cut.named_parameters():
        assert_equal_to(parameter.grad, placement_of(parameter).slice_of(gradients[name]), what=name)


def column_layer(world, case: Layer, gather_output: bool, sequence_parallel: bool) -> None:
    layer, x, dy = case.make()
    y, dx, gradients = oracle(layer, x, dy)
    cut = ColumnParallelLinear.from_linear(layer, world, gather_output, sequence_parallel)
    mine = (part(world, x, 1) if sequence_parallel else x.detach()).requires_grad_()
    out = cut(mine)
    assert_equal_to(out.detach(), y if gather_output else part(world, y, -1), what="y")
    out.backward(dy if gather_output else part(world, dy, -1))
    assert_equal_to(mine.grad, part(world, dx, 1) if sequence_parallel else dx, what="dx")
    assert_parameters(cut, gradients)


@given(layers, st.booleans(), st.booleans())
def test_column_parallel_has_its_features_of_one_process(case, gather_output, sequence_parallel):
    minipar.run(column_layer, case, gather_output, sequence_parallel, world_size=case.tp)


def row(world, case: Layer, input_is_parallel: bool, sequence_parallel: bool) -> None:
    layer, x, dy = case.make()
    y, dx, gradients = oracle(layer, x, dy)
    cut = RowParallelLinear.from_linear(layer, world, input_is_parallel, sequence_parallel)
    mine = (part(world, x, -1) if input_is_parallel else x.detach()).requires_grad_()
    out = cut(mine)
    assert_equal_to(out.detach(), part(world, y, 1) if sequence_parallel else y, what="y")
    out.backward(part(world, dy, 1) if sequence_parallel else dy)
    assert_equal_to(mine.grad, part(world, dx, -1) if input_is_parallel else dx, what="dx")
    assert_parameters(cut, gradients)


@given(layers, st.booleans(), st.booleans())
def test_row_parallel_is_the_whole_sum_with_its_bias_once(case, input_is_parallel, sequence_parallel):
    minipar.run(row, case, input_is_parallel, sequence_parallel, world_size=case.tp)


def pair(world, case: Layer, sequence_parallel: bool) -> None:
    """up, an elementwise function, down: the shape of every block."""
    up, x, _ = case.make()
    down = case.kind(up.out_features, up.in_features, bias=case.bias).double()
    for parameter in down.parameters():
        nn.init.normal_(parameter)
    dz = torch.randn(x.shape, dtype=torch.float64)
    z = down(torch.tanh(up(x)))
    z.backward(dz)
    want = {name: p.grad for name, p in down.named_parameters()}
    want_up = {name: p.grad for name, p in up.named_parameters()}
    first = ColumnParallelLinear.from_linear(up, world, sequence_parallel=sequence_parallel)
    second = RowParallelLinear.from_linear(down, world, sequence_parallel=sequence_parallel)
    mine = (part(world, x, 1) if sequence_parallel else x.detach()).requires_grad_()
    out = second(torch.tanh(first(mine)))
    assert_equal_to(out.detach(), part(world, z, 1) if sequence_parallel else z.detach(), what="z")
    out.backward(part(world, dz, 1) if sequence_parallel else dz)
    assert_equal_to(mine.grad, part(world, x.grad, 1) if sequence_parallel else x.grad, what="dx")
    assert_parameters(first, want_up)
    assert_parameters(second, want)


@given(layers, st.booleans())
def test_a_pair_is_equal_to_one_process(case, sequence_parallel):
    minipar.run(pair, case, sequence_parallel, world_size=case.tp)


def two_in_one_sum(world, sequence_parallel: bool) -> None:
    """Two layers of an input each, whose outputs are added, as in a parallel block."""
    made = [Layer(world.size, 1, 2, 2, 2, True, Linear, seed).make() for seed in (1, 2)]
    y = sum(layer(x) for layer, x, _ in made).detach()
    cut = [RowParallelLinear.from_linear(of, world, sequence_parallel=sequence_parallel) for of, *_ in made]
    out = sum_together(cut, [part(world, x, -1) for _, x, _ in made])
    assert_equal_to(out.detach(), part(world, y, 1) if sequence_parallel else y, what="y")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_with_one_sum_add_each_bias_once(sequence_parallel):
    minipar.run(two_in_one_sum, sequence_parallel, world_size=2)


def naive_and_overlapped(world, case: Layer, defer: bool) -> None:
    """`linear(copy(x), w)`, and the fused function that sums dx once for all matrices."""
    layer, x, dy = case.make()
    weights = [layer.weight.detach().clone().requires_grad_() for _ in range(3)]
    again = [w.detach().clone().requires_grad_() for w in weights]
    queue = WeightGradients() if defer else None
    copied = autograd.copy(world, x)
    naive = [linear(copied, w) for w in weights]
    torch.autograd.backward(naive, [dy, 2 * dy, 3 * dy])
    x_again = x.detach().requires_grad_()
    fused = column_parallel(world, x_again, [ShardedWeight(w, queue) for w in again])
    torch.autograd.backward(fused, [dy, 2 * dy, 3 * dy])
    assert all(torch.equal(a, b) for a, b in zip(naive, fused))
    assert_equal_to(x_again.grad, x.grad, what="dx")
    if defer:
        assert all(w.grad is None for w in again)
        queue.run()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(weights, again))


@examples(12)
@given(layers, st.booleans())
def test_the_overlapped_function_computes_what_the_naive_one_does(case, defer):
    minipar.run(naive_and_overlapped, case, defer, world_size=case.tp)


def shared_shards(world, num_shards: int) -> list:
    """Each shard is on several ranks, each of which uses it for a part of the work."""
    torch.manual_seed(3)
    layer = nn.Linear(4, 2 * num_shards, dtype=torch.float64)
    dys = torch.randn(world.size, 5, 2, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    index = world.rank // (world.size // num_shards)
    cut = ColumnParallelLinear.from_linear(layer, world, num_shards=num_shards)
    out = cut(x)
    whole = layer(x.detach())
    assert_equal_to(out.detach(), whole[:, 2 * index : 2 * index + 2].detach(), what="y")
    out.backward(dys[world.rank])
    x_again = x.detach().requires_grad_()
    per_rank = [
        layer(x_again)[:, 2 * i : 2 * i + 2]
        for i in range(num_shards)
        for _ in range(world.size // num_shards)
    ]
    torch.autograd.backward(per_rank, list(dys))
    assert_equal_to(x.grad, x_again.grad, what="dx")
    assert_parameters(cut, {name: p.grad for name, p in layer.named_parameters()})
    assert "tp" in placement_of(cut.weight).replicated or num_shards == world.size
    return [(placement_of(p), p.detach()) for p in (cut.weight,)]


@pytest.mark.parametrize(("tp", "num_shards"), [(2, 1), (4, 2), (4, 1), (6, 3), (8, 2), (4, 4)])
def test_the_gradient_of_a_shared_shard_is_the_sum_over_its_holders(tp, num_shards):
    parts = minipar.run(shared_shards, num_shards, world_size=tp)
    assert gather([p for part in parts for p in part]).shape == (2 * num_shards, 4)


def bystander(world) -> None:
    """x goes into the layer and past it; the layer's sum must not be written into what goes past."""
    layer, x, dy = Layer(world.size, 1, 2, 2, 2, False, Linear, 1).make()
    y = layer(x)
    (y.sum() + (2 * x).sum()).backward()
    cut = ColumnParallelLinear.from_linear(layer, world)
    mine = x.detach().requires_grad_()
    (cut(mine).sum() + (2 * mine).sum()).backward()
    assert_equal_to(mine.grad, x.grad, what="dx")
    rows = RowParallelLinear.from_linear(layer, world, input_is_parallel=False)
    ones = torch.ones_like(y)
    kept = ones.clone()
    rows(x.detach().requires_grad_()).backward(ones)
    assert torch.equal(ones, kept)


def test_no_collective_writes_into_a_gradient_that_others_read():
    minipar.run(bystander, world_size=2)


def overlapped_order(world) -> list[str]:
    """What happens in a backward, in order: the sum of dx is on its way before dw is computed."""
    events = []
    layer, x, dy = Layer(world.size, 1, 2, 2, 2, False, Linear, 1).make()
    cut = ColumnParallelLinear.from_linear(layer, world)
    launch, product = world.all_reduce_, module.weight_gradient

    def launched(*args, **kwargs):
        events.append("launch")
        handle = launch(*args, **kwargs)
        wait = handle.wait
        handle.wait = lambda: events.append("wait") or wait()
        return handle

    module.weight_gradient = lambda *args: events.append("dw") or product(*args)
    world.all_reduce_ = launched
    try:
        cut(x.detach().requires_grad_()).backward(part(world, dy, -1))
    finally:
        module.weight_gradient = product
        del world.all_reduce_
    return events


def test_the_sum_of_dx_travels_while_dw_is_computed():
    assert minipar.run(overlapped_order, world_size=2) == [["launch", "dw", "wait"]] * 2


def refuse(world) -> list[str]:
    lines = []
    for attempt in (
        lambda: ColumnParallelLinear.from_linear(Linear(4, 9), world),
        lambda: RowParallelLinear.from_linear(Linear(9, 4), world),
        lambda: ColumnParallelLinear.from_linear(Linear(4, 8), world, num_shards=3),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        lines.append(str(error.value))
    return lines


def test_unless_told_a_column_parallel_layer_leaves_its_output_split():
    def output(world):
        weight = nn.Parameter(torch.full((1, 2), world.rank + 1.0))
        return ColumnParallelLinear(weight, None, world)(torch.ones(1, 2)).tolist()

    assert minipar.run(output, world_size=2) == [[[2.0]], [[4.0]]]


def test_features_that_cannot_be_cut_are_refused_with_what_can():
    assert minipar.run(refuse, world_size=2)[0] == [
        "tp=2 does not divide out_features=9; use 1, 3 or 9",
        "tp=2 does not divide in_features=9; use 1, 3 or 9",
        "num_shards=3 does not divide out_features=8; use 1, 2, 4 or 8",
    ]


def test_a_frozen_layer_stays_frozen_when_it_is_split():
    def trained(world):
        layer = torch.nn.Linear(4, 4).requires_grad_(False)
        cuts = ColumnParallelLinear.from_linear(layer, world), RowParallelLinear.from_linear(layer, world)
        return [p.requires_grad for cut in cuts for p in cut.parameters()]

    assert minipar.run(trained, world_size=2) == [[False] * 4] * 2
