"""Second derivatives through the differentiable collectives, against finite differences of the first."""

from functools import partial

import pytest
import torch
from torch.autograd import Function, grad, gradcheck, gradgradcheck

import minipar
from minipar.comm import autograd as d
from minipar.expert.overlapped_all_to_all import AllToAllRoute, OverlappedAllToAll
from minipar.tensor_parallel import (
    ShardedWeight,
    column_parallel,
    gather_matmul,
    matmul_scatter,
    vocab_parallel_cross_entropy,
)
from tests.comm.test_autograd import REPLICATED

ROWS, STEP = 4, 1e-5


def weights(comm, n: int, same_everywhere: bool, seed: int) -> torch.Tensor:
    """Another weight for each element, and for each rank unless it is the same everywhere."""
    generator = torch.Generator().manual_seed(seed + (0 if same_everywhere else 10 * comm.rank))
    return torch.rand(n, dtype=torch.float64, generator=generator) + 0.5


def penalty(comm, operator, x, x_everywhere: bool, y_everywhere: bool) -> torch.Tensor:
    """This rank's term of a gradient penalty: sum of v g^2 + x^2, where g is the gradient of all ranks' sum of w y^3."""
    y = operator(comm, x)
    loss = (weights(comm, y.numel(), y_everywhere, 1) * y.flatten() ** 3).sum()
    (g,) = grad(loss, x, create_graph=True)
    return (weights(comm, x.numel(), x_everywhere, 2) * g**2).sum() + (x**2).sum()


def over_ranks(comm, term: torch.Tensor, x_everywhere: bool) -> float:
    """The penalty of all ranks together: what is the same everywhere counts once."""
    return term.item() if x_everywhere else comm.all_reduce(term.detach()).item()


def errors(comm, operator, x_everywhere: bool, y_everywhere: bool) -> float:
    """The largest difference between the penalty's gradient and its finite differences, over the largest of these."""
    p, rank = comm.size, comm.rank
    start = weights(comm, ROWS * p, x_everywhere, 3)
    term = partial(penalty, comm, operator, x_everywhere=x_everywhere, y_everywhere=y_everywhere)
    x = start.clone().requires_grad_()
    (got,) = grad(term(x), x)
    want = torch.zeros_like(start)
    for owner in range(1 if x_everywhere else p):
        for i in range(len(start)):
            ends = []
            for step in (STEP, -STEP):
                moved = start.clone()
                if x_everywhere or rank == owner:
                    moved[i] += step
                ends.append(over_ranks(comm, term(moved.requires_grad_()), x_everywhere))
            if x_everywhere or rank == owner:
                want[i] = (ends[0] - ends[1]) / (2 * STEP)
    return ((got - want).abs().max() / want.abs().max()).item()


OPERATORS = {name: getattr(d, name) for name in REPLICATED}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradient_penalty_gradients_match_finite_differences(size):
    def all_errors(world):
        return {name: errors(world, operator, *REPLICATED[name]) for name, operator in OPERATORS.items()}

    for found in minipar.run(all_errors, world_size=size):
        assert all(error < 1e-7 for error in found.values()), found


def test_torchs_own_check_passes_in_a_group_of_one():
    def passes(world):
        x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
        functions = [partial(operator, world) for operator in OPERATORS.values()]
        functions += [partial(d.all_gather, world, dim=1), partial(d.reduce_scatter, world, dim=1)]
        return [gradcheck(f, x) and gradgradcheck(f, x) for f in functions]

    assert all(minipar.run(passes, world_size=1)[0])


class Forgetful(Function):
    """An operator and its adjoint, whose backward is computed without autograd's knowledge."""

    @staticmethod
    def forward(ctx, x, operator, adjoint):
        ctx.adjoint = adjoint
        return operator(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.adjoint(g.detach()), None, None


class WrongPair(Function):
    """A first derivative that is right, and an identity where the second needs the sum over ranks."""

    @staticmethod
    def forward(ctx, x, operator, adjoint):
        ctx.adjoint = adjoint
        return operator(x)

    @staticmethod
    def backward(ctx, g):
        return WrongPair.apply(g, ctx.adjoint, lambda x: x), None, None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [Forgetful, WrongPair])
def test_a_backward_that_has_no_right_backward_of_its_own_is_noticed(fault):
    def all_errors(world):
        def all_reduce(comm, x):
            return fault.apply(x, comm.all_reduce, lambda g: g.view_as(g))

        def copy(comm, x):
            return fault.apply(x, lambda t: t.view_as(t), comm.all_reduce)

        pairs = {"all_reduce": all_reduce, "copy": copy}
        return [errors(world, operator, *REPLICATED[name]) for name, operator in pairs.items()]

    for found in minipar.run(all_errors, world_size=3):
        assert max(found) > 1e-2


def test_send_and_recv_refuse_second_derivatives_in_words():
    def message(world):
        x = torch.ones(3, requires_grad=True)
        if world.rank == 0:
            y = d.send(world, x, 1)
        else:
            y = (d.recv(world, (3,), x.dtype, 0) * x) ** 3
        with pytest.raises(
            RuntimeError, match="create_graph=True in a backward through .*send or recv.*all_to_all"
        ):
            y.sum().backward(create_graph=True)
        world.barrier()

    minipar.run(message, world_size=2)


def exchanged(comm, x, w):
    exchange = OverlappedAllToAll(AllToAllRoute(comm), [[1] * comm.size] * comm.size, overlap=True)
    return exchange.receive(exchange.start(x[0, : comm.size]))


ONCE = {
    "column_parallel": lambda comm, x, w: column_parallel(comm, x, [ShardedWeight(w)])[0],
    "gather_matmul": lambda comm, x, w: gather_matmul(comm, x, [ShardedWeight(w)])[0],
    "matmul_scatter": matmul_scatter,
    "vocab_parallel_cross_entropy": lambda comm, x, w: vocab_parallel_cross_entropy(comm, x, torch.zeros(1, 4).long()),
    "an overlapped all-to-all": exchanged,
}  # fmt: skip


def start() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 3), (2, 3)
    x, w = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), w.requires_grad_()


@pytest.mark.parametrize("name", ONCE)
def test_missing_second_derivatives_are_refused_for_any_loss(name):
    """A constant gradient of the output, too, with which only the weights would get a second derivative."""

    def refused(world):
        for loss in (lambda y: y.sum(), lambda y: (y**3).sum()):
            x, w = start()
            y = ONCE[name](world, x, w)
            with pytest.raises(
                RuntimeError, match=f"create_graph=True in a backward through {name}, .*use DDP or Zero"
            ):
                grad(loss(y), x, create_graph=True)
        y = ONCE[name](world, *start())
        y.sum().backward()  # an ordinary backward goes on as before

    minipar.run(refused, world_size=2)


def test_a_column_parallel_product_of_one_rank_has_second_derivatives():
    def passes(world):
        return gradgradcheck(lambda x, w: ONCE["column_parallel"](world, x, w) ** 3, start())

    assert all(minipar.run(passes, world_size=1))
