"""A collective is run by itself; what is wrong on one of its ranks is named."""

import torch

from minipar.comm import collectives, ring
from minipar.extras.dry_run import kinds
from minipar.extras.dry_run.kinds import run_kinds
from minipar.mesh import Mesh


def sums(world, tensors):
    world.all_reduce(torch.zeros(65), algorithm="tree")


def run():
    return run_kinds(Mesh(8, dp=8), ["dp"], sums)


def test_a_collective_is_run_by_all_its_ranks():
    assert list(run().collectives.values()) == [14]


def test_a_collective_of_too_many_messages_is_not_run(monkeypatch):
    monkeypatch.setattr(kinds, "MOST_MESSAGES", 10)
    assert list(run().collectives.values()) == [None]


def test_a_collective_that_is_wrong_on_one_rank_is_named(monkeypatch):
    def loses(comm, x, op="sum", out=None):
        if comm.rank == 2:
            return x
        return ring.all_reduce(comm, x, op, out)

    monkeypatch.setitem(collectives.ALGORITHMS["all_reduce"], "tree", loses)
    found = run().faults
    assert all(fault.startswith("all_reduce sum of [65] float32 over 8 ranks: ") for fault in found)
    assert any("to rank 2 on comm 'world' (all_reduce sum" in fault for fault in found)
