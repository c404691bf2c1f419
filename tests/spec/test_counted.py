"""What is sent through torch.distributed is counted, whoever asks for it, as a ring's, a tree's or its own messages."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minipar
from minipar.spec.collectives import recording_peers
from minipar.spec.counted import SENDS_NOTHING, Posted, counted, sent_by, within

P, LENGTH = 3, 12


def torchs(comm, x):
    """Each way to a collective of torch: name -> (what it counts as, the call)."""
    group, p, parts = comm.process_group(), comm.size, list(x.chunk(comm.size))
    whole, part, first = x.new_empty(p * len(x)), torch.empty_like(parts[0]), comm.rank == 0
    several = [torch.empty_like(x) for _ in range(p)]
    f = functional
    return {
        "all_reduce": ("all_reduce", lambda: dist.all_reduce(x, group=group)),
        "functional all_reduce": ("all_reduce", lambda: f.all_reduce(x, "sum", group).wait()),
        "coalesced all_reduce": ("all_reduce", lambda: f.all_reduce_coalesced([x], "sum", group)[0].wait()),
        "all_gather": ("all_gather", lambda: dist.all_gather(several, x, group=group)),
        "all_gather_into_tensor": ("all_gather", lambda: dist.all_gather_into_tensor(whole, x, group=group)),
        "functional all_gather": ("all_gather", lambda: f.all_gather_tensor(x, 0, group).wait()),
        "reduce_scatter": ("reduce_scatter", lambda: dist.reduce_scatter(part, parts, group=group)),
        "reduce_scatter_tensor": ("reduce_scatter", lambda: dist.reduce_scatter_tensor(part, x, group=group)),
        "functional reduce_scatter": (
            "reduce_scatter",
            lambda: f.reduce_scatter_tensor(x, "sum", 0, group).wait(),
        ),
        "all_to_all": (
            "all_to_all",
            lambda: dist.all_to_all([torch.empty_like(y) for y in parts], parts, group=group),
        ),
        "all_to_all_single": (
            "all_to_all",
            lambda: dist.all_to_all_single(torch.empty_like(x), x, group=group),
        ),
        "functional all_to_all": ("all_to_all", lambda: f.all_to_all_single(x, None, None, group).wait()),
        "broadcast": ("broadcast", lambda: dist.broadcast(x, group_src=1, group=group)),
        "reduce": ("reduce", lambda: dist.reduce(x, group_dst=1, group=group)),
        "gather": ("gather", lambda: dist.gather(x, several if first else None, group_dst=0, group=group)),
        "scatter": ("scatter", lambda: dist.scatter(x, several if first else None, group_src=0, group=group)),
    }


def ours(kind: str, rank: int) -> int:
    """Bytes that a rank sends by the formulas of the specifications, or of one message for each rank that gets one."""
    whole = 8 * LENGTH
    return {
        "all_reduce": 4 * whole // 3,
        "reduce_scatter": 2 * whole // 3,
        "all_gather": 2 * whole,
        "all_to_all": 2 * whole // 3,
        "broadcast": 2 * whole * (rank == 1),  # three ranks: the root sends to both others
        "reduce": whole * (rank != 1),
        "gather": whole * (rank != 0),
        "scatter": 2 * whole * (rank == 0),
    }[kind]


def _counts(world):
    found = {}
    x = torch.ones(LENGTH, dtype=torch.float64)
    for name, (kind, call) in torchs(world, x).items():
        with recording_peers(world) as by_peer, counted(world) as sent:
            call()
        found[name] = (kind, sent.sent_bytes, dict(sent.by_kind), sum(by_peer.values()))
    return found


def test_torchs_collectives_count_as_a_ring_tree_or_parts():
    for rank, found in enumerate(minipar.run(_counts, world_size=P)):
        for name, (kind, num_bytes, kinds, by_peer) in found.items():
            assert (name, num_bytes, by_peer) == (name, ours(kind, rank), ours(kind, rank))
            assert kinds == {f"torch's {kind}": num_bytes}


def to_the_next(world, x):
    group, y = world.process_group(), torch.empty_like(x)
    sent = dist.isend(x, group_dst=(world.rank + 1) % world.size, group=group)
    dist.recv(y, group_src=(world.rank - 1) % world.size, group=group)
    sent.wait()


def _once(world):
    """Bytes of what a Comm sends, of a backward in which DDP's reducer sends, and of a message between two ranks."""
    group, ddp = (
        world.process_group(),
        DistributedDataParallel(nn.Linear(8, 8), process_group=world.process_group()),
    )
    found = []
    for call in (
        lambda: world.all_reduce(torch.ones(12, requires_grad=True).clone(), algorithm="ring"),
        lambda: world.exchange(torch.ones(3), 1 - world.rank, (3,), torch.float32, 1 - world.rank),
        lambda: ddp(torch.ones(2, 8)).sum().backward(),
        lambda: to_the_next(world, torch.ones(5)),
        lambda: dist.barrier(group=group),
    ):
        with counted(world) as sent:
            call()
        found.append((sent.sent_bytes, sent.messages))
    return found


def test_a_comms_messages_and_a_reducers_count_once():
    for found in minipar.run(_once, world_size=2):
        assert found == [(48, 2), (12, 1), (4 * 72, 2), (20, 1), (0, 0)]


def _in_another(world):
    with counted(world) as sent, within(world), Posted(lambda *sent: None):
        world.exchange(torch.ones(3), 1 - world.rank, (3,), torch.float32, 1 - world.rank)
        dist.all_reduce(torch.ones(4), group=world.process_group())
    return dict(sent.by_kind)


def test_a_count_around_another_counts_the_same():
    assert minipar.run(_in_another, world_size=2) == [{"exchange": 12, "torch's all_reduce": 16}] * 2


OPERATORS = sorted(
    {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("c10d::", "_c10d_functional::"))
    }
)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_of_torch_has_a_formula_or_sends_nothing(name):
    name = name.partition("::")[2]
    x = torch.ones(2, 2)
    given = {"input": [x, x], "tensors": [x], "tensor": x, "dst": 1, "op_list": ["isend"], "peer_list": [1]}
    if not SENDS_NOTHING.search(name):
        kind, messages = sent_by(name, given, 0, 2)
        assert messages or kind in ("reduce", "gather"), kind  # to the root, which rank 0 is


def test_an_operator_without_a_formula_is_refused_by_name():
    with pytest.raises(
        NotImplementedError, match=re.escape("torch.distributed's sparse_sum_ is not counted")
    ):
        sent_by("sparse_sum_", {"input": torch.ones(2)}, 0, 2)


def test_a_tree_of_any_size_reaches_each_rank_once():
    for size in range(1, 10):
        for root in range(size):
            given = {"tensors": [torch.ones(1)], "root_rank": root}
            down = [to for r in range(size) for to, _ in sent_by("broadcast_", given, r, size)[1]]
            assert sorted([*down, root]) == list(range(size))
            assert [len(sent_by("reduce_", given, r, size)[1]) for r in range(size)] == [
                r != root for r in range(size)
            ]


def test_a_mode_passes_results_on_as_they_are():
    with Posted(lambda *sent: None):
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
