"""A collective is proven by as many ranks as differ; what is wrong on one of them is named."""

import torch

from minipar.comm import collectives, ring
from minipar.extras.dry_run import prove as prove_module
from minipar.extras.dry_run.call import Call
from minipar.extras.dry_run.kinds import run_kinds
from minipar.extras.dry_run.prove import prove
from minipar.mesh import Mesh

SUM = Call("all_reduce", "ring", None, 8, (64,), torch.float32, "sum", None, None)


def test_a_collective_is_run_by_as_many_ranks_as_differ():
    assert prove(SUM) == ([], 8 * 14, 8 * 14 * 8 * 4, "alike")
    uneven = SUM._replace(shape=(65,))
    assert prove(uneven)[0::3] == ([], "whole")
    assert prove(SUM._replace(algorithm="tree"))[0::3] == ([], "whole")
    assert prove(SUM._replace(algorithm="halving_doubling", size=6))[0::3] == ([], "whole")


def test_a_collective_of_too_many_steps_is_run_by_fewer(monkeypatch):
    monkeypatch.setattr(prove_module, "MOST_STEPS", 100)
    assert prove(SUM._replace(algorithm="doubling", size=64))[0::3] == ([], "smaller")
    gathered = Call("all_gather", "ring", None, 60, (2,), torch.int64, None, None, tuple(range(60)))
    assert prove(gathered)[0::3] == ([], "smaller")


def test_a_collective_that_is_wrong_on_one_rank_is_named(monkeypatch):
    def loses(comm, x, op="sum", out=None):
        if comm.rank == 2:
            return x
        return ring.all_reduce(comm, x, op, out)

    monkeypatch.setitem(collectives.ALGORITHMS["all_reduce"], "tree", loses)
    wrong = prove(SUM._replace(algorithm="tree", shape=(65,)))
    assert any("to rank 2 on comm 'world' (all_reduce sum" in fault for fault in wrong.faults)

    def sums(world):
        world.all_reduce(torch.zeros(65), algorithm="tree")

    found = run_kinds(Mesh(8, dp=8), ["dp"], lambda world, _: sums(world)).faults
    assert found[0].startswith("all_reduce sum of [65] float32 over 8 ranks: ")
