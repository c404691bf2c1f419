"""The check of the collectives goes red where a ring is broken in the ways people break it."""

from contextlib import contextmanager

import pytest
import torch

import minipar
from minipar.comm import ring, tree
from tests.comm.cases import Case, failures

CASES = [
    Case(name, "ring", (10, 2), torch.float64) for name in ("all_reduce", "reduce_scatter", "all_gather")
]


@contextmanager
def replaced(module, name, by):
    usual = getattr(module, name)
    setattr(module, name, by(usual))
    try:
        yield
    finally:
        setattr(module, name, usual)


class Crooked:
    """A Comm whose neighbour is two ranks away."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def exchange(self, x, to, shape, dtype, source, out):
        to, source = (to + 1) % self._comm.size, (source - 1) % self._comm.size
        return self._comm.exchange(x, to, shape, dtype, source, out=out)


def a_step_skipped(usual):
    return lambda comm, steps, *rest: usual(comm, steps[:-1], *rest)


def the_first_step_skipped(usual):
    return lambda comm, steps, *rest: usual(comm, steps[1:], *rest)


def a_wrong_neighbour(usual):
    return lambda comm, *rest: usual(Crooked(comm), *rest)


def not_added(usual):
    def not_combining(comm, steps, parts, outputs, reduction=None):
        reduction = reduction and reduction._replace(combine=lambda a, b, out: out.copy_(a))
        usual(comm, steps, parts, outputs, reduction)

    return not_combining


@pytest.mark.parametrize("fault", [a_step_skipped, the_first_step_skipped, a_wrong_neighbour, not_added])
def test_a_broken_ring_is_noticed(fault):
    def wrong(world):
        with replaced(ring, "_ring_steps", fault):
            return failures(world, CASES)

    found = minipar.run(wrong, world_size=5, timeout_s=10)
    summing = 2 if fault is not_added else 3  # an all-gather adds nothing
    assert len({why.split("algorithm")[0] for rank in found for why in rank}) >= summing
    assert minipar.run(failures, CASES, world_size=5, timeout_s=10) == [[]] * 5


def test_a_mean_divided_twice_is_noticed():
    case = Case("all_reduce", "tree", (7,), torch.float32, "mean")

    def twice(usual):
        def reduce_into(comm, x, out, root, reduction):
            usual(comm, x, out, root, reduction)
            out.div_(comm.size)

        return reduce_into

    def wrong(world):
        with replaced(tree, "_reduce_into", twice):
            return failures(world, [case])

    assert all(minipar.run(wrong, world_size=3, timeout_s=10))
