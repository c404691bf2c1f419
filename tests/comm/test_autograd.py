"""Each backward is the adjoint of its forward: <y, A x> = <A^T y, x>, exactly, in float64 on whole numbers."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import Function

import minipar
from minipar.comm import autograd as d
from tests.examples import examples
from tests.strategies import seeds, shapes, splits

# name -> (is x the same on every rank, is y). What is the same everywhere is one vector, and counts once.
REPLICATED = {
    "copy": (True, False),
    "all_reduce": (False, True),
    "split": (True, False),
    "gather": (False, True),
    "all_gather": (False, False),
    "reduce_scatter": (False, False),
    "all_to_all": (False, False),
}
CUTS_A_WHOLE, JOINS_CHUNKS = ("split", "reduce_scatter"), ("gather", "all_gather")


class Pair(NamedTuple):
    """`sizes`: one a rank, None for torch.chunk's, or for all_to_all a row a rank."""

    name: str
    shape: tuple[int, ...]
    dim: int
    sizes: list | None
    seed: int


@st.composite
def pairs(draw, size: int) -> Pair:
    name = draw(st.sampled_from(list(REPLICATED)))
    shape = list(draw(shapes(min_dims=1, max_dims=3, max_side=7)))
    dim = 0 if name == "all_to_all" else draw(st.integers(0, len(shape) - 1))
    sizes = None
    if name == "all_to_all":
        sizes = [draw(splits(shape[0], size)) for _ in range(size)]
    elif name in CUTS_A_WHOLE + JOINS_CHUNKS and draw(st.booleans()):
        sizes = draw(splits(shape[dim], size))
    return Pair(name, tuple(shape), dim, sizes, draw(seeds))


def whole_numbers(shape, *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randint(-9, 10, shape, generator=generator).double()


def forward(comm, pair: Pair, x: torch.Tensor) -> torch.Tensor:
    if pair.name == "all_to_all":
        return d.all_to_all(comm, x, pair.sizes[comm.rank], [row[comm.rank] for row in pair.sizes])
    function = getattr(d, pair.name)
    if pair.name in CUTS_A_WHOLE + JOINS_CHUNKS:
        return function(comm, x, pair.dim, pair.sizes)
    return function(comm, x)


def products(comm, drawn: list[Pair]) -> list[tuple[float, float, bool]]:
    """This rank's shares of <y, A x> and <A^T y, x>, and whether x and y are still what they were."""
    return [_products(comm, pair) for pair in drawn]


def _products(comm, pair: Pair) -> tuple[float, float, bool]:
    x_everywhere, y_everywhere = REPLICATED[pair.name]
    shape = list(pair.shape)
    if pair.name in JOINS_CHUNKS:
        shape[pair.dim] = (pair.sizes or [shape[pair.dim]] * comm.size)[comm.rank]
    x = whole_numbers(shape, pair.seed, 0 if x_everywhere else comm.rank).requires_grad_()
    before = x.detach().clone()
    ax = forward(comm, pair, x)
    y = whole_numbers(ax.shape, pair.seed + 1, 0 if y_everywhere else comm.rank)
    given = y.clone()
    ax.backward(given)
    pure = torch.equal(x.detach(), before) and torch.equal(given, y)
    left = (y * ax.detach()).sum().item() if not y_everywhere or comm.rank == 0 else 0.0
    right = (x.grad * before).sum().item() if not x_everywhere or comm.rank == 0 else 0.0
    return left, right, pure


@examples(30)
@given(st.data())
def test_every_pair_is_an_adjoint(data):
    size = data.draw(st.integers(1, 8))
    drawn = data.draw(st.lists(pairs(size), min_size=8, max_size=12))
    ranks = minipar.run(products, drawn, world_size=size)
    for i, pair in enumerate(drawn):
        left, right = (sum(rank[i][side] for rank in ranks) for side in (0, 1))
        assert left == right, pair
        assert all(rank[i][2] for rank in ranks), pair


@given(st.integers(2, 8), shapes(max_dims=3, max_side=5))
@examples(10)
def test_send_and_recv_are_an_adjoint(size, shape):
    """Rank 0's x goes to the last rank, and its gradient comes back."""

    def products(world):
        x, y = whole_numbers(shape, 1).requires_grad_(), whole_numbers(shape, 2)
        if world.rank == 0:
            d.send(world, x, world.size - 1).sum().backward()
            return x.grad, torch.equal(x.detach(), whole_numbers(shape, 1))
        if world.rank == world.size - 1:
            received = d.recv(world, shape, torch.float64, 0)
            received.backward(y)
            return received.detach(), torch.equal(y, whole_numbers(shape, 2))
        return None, True

    (gradient, x_kept), *_, (received, y_kept) = minipar.run(products, world_size=size)
    assert torch.equal(received, whole_numbers(shape, 1))
    assert torch.equal(gradient, whole_numbers(shape, 2))
    assert x_kept
    assert y_kept


def test_all_gather_sums_gradients_over_ranks_unlike_gather():
    """The same use on every rank: `gather` counts it once, `all_gather` p times."""

    def gradients(world):
        out = []
        for function in (d.gather, d.all_gather):
            x = torch.ones(2, requires_grad=True)
            function(world, x).sum().backward()
            out.append(x.grad)
        return out

    for whole, summed in minipar.run(gradients, world_size=3):
        assert whole.tolist() == [1, 1]
        assert summed.tolist() == [3, 3]


# A bystander: b gets the very tensor that the backward of its neighbour is handed ------------------------------


class InPlace(Function):
    """The all-reduce of a well-known tutorial: it sums into the gradient it was handed."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce_(grad), None


def gradient_of_a_bystander(world, function) -> list[list[float]]:
    x, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    neighbour = b * 1  # computed before, so its backward runs after
    (function(world, x) + neighbour).backward(torch.tensor([1.0, 2.0, 3.0]))
    return [b.grad.tolist(), x.grad.tolist()]


def test_a_bystanders_gradient_stays_what_it_is():
    for bystander, summed in minipar.run(gradient_of_a_bystander, d.copy, world_size=2):
        assert bystander == [1, 2, 3]
        assert summed == [2, 4, 6]


def test_summing_in_place_corrupts_a_bystanders_gradient():
    """The fault that purity prevents; the check above notices it."""

    def in_place(comm, x):
        return InPlace.apply(x, comm)

    for bystander, _ in minipar.run(gradient_of_a_bystander, in_place, world_size=2):
        assert bystander == [2, 4, 6]


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "tree", "native"])
def test_pairs_take_an_algorithm(algorithm):
    def sums(world):
        x = torch.ones(4, requires_grad=True)
        y = d.all_reduce(world, x, algorithm=algorithm)
        d.copy(world, x, algorithm=algorithm).sum().backward()
        return y.tolist() + x.grad.tolist()

    assert minipar.run(sums, world_size=4) == [[4.0] * 8] * 4


def test_sizes_that_do_not_cut_are_refused():
    def message(world):
        with pytest.raises(ValueError, match=r"sizes=\[1, 1\] does not cut dim 1 of length 5 into 2 parts"):
            d.split(world, torch.zeros(3, 5), 1, [1, 1])
        with pytest.raises(ValueError, match=r"sizes=\[5\]"):
            d.reduce_scatter(world, torch.zeros(3, 5), 1, [5])

    minipar.run(message, world_size=2)
