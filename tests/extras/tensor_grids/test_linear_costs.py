"""Layers on grids and cubes of ranks are the linear layer; what they send and hold is what the table says."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.extras.tensor_grids.cube import CubeLinear
from minipar.extras.tensor_grids.grid import SummaLinear
from minipar.extras.tensor_grids.linear_costs import column_cost, cube_cost, mlp_cost, row_cost, summa_cost
from minipar.mesh import gather, placement_of
from minipar.model import Linear
from minipar.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds

DOUBLE = 8


class Pair(NamedTuple):
    """Two layers, D -> F -> D, of M rows; sizes in multiples of 4, which every layout of 8 ranks divides."""

    rows: int
    inputs: int
    hidden: int
    bias: bool
    seed: int

    def make(self):
        torch.manual_seed(self.seed)
        up, down = (
            nn.Linear(self.inputs, self.hidden, self.bias),
            nn.Linear(self.hidden, self.inputs, self.bias),
        )
        x = torch.randn(self.rows, self.inputs).double().requires_grad_()
        return up.double(), down.double(), x


fours = st.integers(1, 4).map(lambda n: 4 * n)
pairs = st.builds(Pair, fours, fours, fours, st.booleans(), seeds)


def layers_of(layout: str, up, down, world):
    """Both layers cut, and which part of x and of the output a rank holds."""
    if layout == "3D":
        first, second = CubeLinear.from_linear(up, world), CubeLinear.from_linear(down, world, swap_jl=True)
        return first, second, first.input, second.output
    depth = 2 if layout == "2.5D" else 1
    first, second = (SummaLinear.from_linear(layer, world, depth) for layer in (up, down))
    return first, second, first.activation, second.activation


def compare(world, layout: str, case: Pair):
    up, down, x = case.make()
    z = down(torch.tanh(up(x)))
    z.square().sum().backward()
    first, second, input_part, output_part = layers_of(layout, up, down, world)
    mine = input_part(*x.shape).slice_of(x.detach()).clone().requires_grad_()
    out = second(torch.tanh(first(mine)))
    assert_equal_to(out.detach(), output_part(*z.shape).slice_of(z.detach()), what="z")
    out.square().sum().backward()
    assert_equal_to(mine.grad, input_part(*x.shape).slice_of(x.grad), what="dx")
    for cut, whole in ((first, up), (second, down)):
        for (name, parameter), (_, want) in zip(cut.named_parameters(), whole.named_parameters()):
            assert_equal_to(parameter.grad, placement_of(parameter).slice_of(want.grad), what=name)
    return [(input_part(*x.shape), mine.detach())], [(placement_of(first.weight), first.weight.detach())]


RANKS = [("2D", 1), ("2D", 4), ("2.5D", 2), ("2.5D", 8), ("3D", 1), ("3D", 8)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "ranks"), RANKS)
@examples(6)
@given(pairs)
def test_a_pair_of_layers_is_that_of_one_process(layout, ranks, case):
    of_ranks = minipar.run(compare, layout, case, world_size=ranks)
    gather([part for inputs, _ in of_ranks for part in inputs])  # blocks cover the input, and overlap nowhere
    gather([part for _, weights in of_ranks for part in weights])


def sent_and_held(world, layout: str, m: int, d: int, f: int) -> tuple[int, int]:
    comm = world.using("ring")
    layer, x = Linear(d, f).double(), torch.randn(m, d, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    if layout == "column":
        cut = ColumnParallelLinear.from_linear(layer, comm)
    elif layout == "row":
        cut, x = RowParallelLinear.from_linear(layer, comm), x.chunk(comm.size, 1)[comm.rank].clone()
    elif layout == "3D":
        cut = CubeLinear.from_linear(layer, comm)
        x = cut.input(m, d).slice_of(x).clone()
    else:
        cut = SummaLinear.from_linear(layer, comm, depth=2 if layout == "2.5D" else 1)
        x = cut.activation(m, d).slice_of(x).clone()
    comm.traffic.reset()
    y = cut(x.requires_grad_())
    y.sum().backward()
    return comm.traffic.sent_bytes, cut.weight.nbytes + x.nbytes + y.nbytes


FORMULAS = {
    "column": column_cost,
    "row": row_cost,
    "2D": summa_cost,
    "2.5D": lambda *sizes: summa_cost(*sizes, depth=2),
    "3D": cube_cost,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("layout", "ranks"), [("column", 4), ("row", 4), ("column", 8), ("row", 8), *RANKS])
def test_each_layout_sends_and_holds_what_the_table_says(layout, ranks):
    sizes = (16, 8, 24)
    want = FORMULAS[layout](ranks, *sizes)
    got = minipar.run(sent_and_held, layout, *sizes, world_size=ranks)
    assert got == [(want.sent * DOUBLE, want.held * DOUBLE)] * ranks


def test_one_dimension_wins_in_a_machine_and_loses_in_a_large_grid():
    """An MLP of 4096 -> 16384: with 8 ranks and few rows 1D sends least, with 64 ranks and many rows, most."""
    one_dimension, d, f = (column_cost, row_cost), 4096, 16384
    few, many = 2048, 262144
    assert mlp_cost(*one_dimension, 4, few, d, f).sent < mlp_cost(summa_cost, summa_cost, 4, few, d, f).sent
    cuts = {"1D": one_dimension, "2D": (summa_cost, summa_cost), "3D": (cube_cost, cube_cost)}
    sent = {name: mlp_cost(*costs, 64, many, d, f).sent for name, costs in cuts.items()}
    assert sent["3D"] < sent["2D"] < sent["1D"]
    held = mlp_cost(*one_dimension, 64, many, d, f).held
    assert held > 5 * mlp_cost(cube_cost, cube_cost, 64, many, d, f).held


def refuse(world) -> list[str]:
    lines = []
    for attempt in (
        lambda: SummaLinear.from_linear(Linear(4, 4), world),
        lambda: SummaLinear.from_linear(Linear(4, 4), world, depth=4),
        lambda: CubeLinear.from_linear(Linear(4, 4), world),
        lambda: SummaLinear.from_linear(Linear(4, 4), world, depth=8),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        lines.append(str(error.value))
    return lines


def test_ranks_that_make_no_grid_are_refused():
    assert minipar.run(refuse, world_size=6)[0] == [
        "tp=6 is not depth=1 times a square; use 1, 4, 9, 16 ...",
        "depth=4 does not divide tp=6; use 1, 2, 3 or 6",
        "tp=6 is not a cube; use 1, 8, 27 ...",
        "depth=8 does not divide tp=6; use 1, 2, 3 or 6",
    ]
