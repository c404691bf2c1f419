"""The barrier: nobody leaves before everybody has entered, after ceil(log2 p) messages of one byte."""

from math import ceil, log2

import pytest
import torch

import minipar
from minipar.comm.barrier import dissemination_barrier


class Steps:
    """A group's rank of which only its exchanges are kept, as pairs of to and source."""

    device = torch.device("cpu")

    def __init__(self, rank, size):
        self.rank, self.size, self.pairs = rank, size, []

    def exchange(self, x, to, shape, dtype, source):
        self.pairs.append((to, source))


@pytest.mark.parametrize("size", range(1, 18))
def test_when_a_rank_leaves_it_has_heard_of_every_ranks_entry(size):
    ranks = [Steps(rank, size) for rank in range(size)]
    for rank in ranks:
        dissemination_barrier(rank)
    heard = [{rank} for rank in range(size)]
    for step in zip(*(rank.pairs for rank in ranks), strict=True):
        assert all(step[to][1] == rank for rank, (to, _) in enumerate(step))  # every message is received
        heard = [own | heard[source] for own, (_, source) in zip(heard, step)]
    assert heard == [set(range(size))] * size
    assert len(ranks[0].pairs) == ceil(log2(size))


def test_a_comms_barrier_sends_one_byte_a_step():
    def sent(world):
        world.barrier()
        return world.traffic.messages, world.traffic.sent_bytes, set(world.traffic.by_kind)

    assert minipar.run(sent, world_size=5) == [(3, 3, {"barrier"})] * 5
