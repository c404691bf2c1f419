"""A collective is run by itself; what is wrong on one of its ranks is named."""

import torch

from minipar.comm import collectives, ring
from minipar.extras.dry_run import call as call_module
from minipar.extras.dry_run.call import Call, prove
from minipar.extras.dry_run.kinds import run_kinds
from minipar.mesh import Mesh

SUM = Call("all_reduce", "ring", None, 8, (64,), torch.float32, (("op", "sum"),))


def test_a_collective_is_run_by_all_its_ranks():
    assert prove(SUM, each=14) == ([], 8 * 14, 8 * 14 * 8 * 4, True)
    for run in (SUM._replace(shape=(65,)), SUM._replace(algorithm="halving_doubling", size=6)):
        assert prove(run, each=14)[0::3] == ([], True)


def test_a_collective_of_too_many_messages_is_run_by_fewer(monkeypatch):
    monkeypatch.setattr(call_module, "MOST_MESSAGES", 100)
    assert prove(SUM._replace(algorithm="doubling", size=64), each=6)[0::3] == ([], False)
    gathered = Call("all_gather", "ring", None, 60, (2,), torch.int64, (), tuple(range(60)))
    assert prove(gathered, each=59)[0::3] == ([], False)
    assert (
        prove(Call("reduce", "tree", None, 60, (2,), torch.int64, (("op", "max"), ("root", 59))), 1)[0] == []
    )


def test_a_collective_that_is_wrong_on_one_rank_is_named(monkeypatch):
    def loses(comm, x, op="sum", out=None):
        if comm.rank == 2:
            return x
        return ring.all_reduce(comm, x, op, out)

    monkeypatch.setitem(collectives.ALGORITHMS["all_reduce"], "tree", loses)
    wrong = prove(SUM._replace(algorithm="tree", shape=(65,)), each=14)
    assert any("to rank 2 on comm 'world' (all_reduce sum" in fault for fault in wrong.faults)

    def sums(world):
        world.all_reduce(torch.zeros(65), algorithm="tree")

    found = run_kinds(Mesh(8, dp=8), ["dp"], lambda world, _: sums(world)).faults
    assert found[0].startswith("all_reduce sum of [65] float32 over 8 ranks: ")
