"""A Comm that carries an algorithm: the same ranks, stream and ledger, another meaning of "auto"."""

import pytest
import torch

import minipar


def messages_of_an_all_reduce(world) -> list:
    """By several Comms of the same ranks, in turn. A ring sends 2(p-1) messages, halving and doubling 2 log2 p."""
    ring, x = world.using("ring"), torch.ones(8, dtype=torch.float64)
    inner = ring.subgroup(range(world.size), "inner")
    ring.all_to_all(x)  # has no ring: as without
    found = []
    for comm in (world, ring, inner, inner.using("halving_doubling"), ring.using("auto"), world):
        before = world.traffic.messages
        assert comm.all_reduce(x).tolist() == [world.size] * 8
        found.append(world.traffic.messages - before)
    return found


def test_collectives_and_subgroups_use_the_carried_algorithm():
    assert minipar.run(messages_of_an_all_reduce, world_size=4) == [[4, 6, 6, 4, 4, 4]] * 4


def test_an_unknown_algorithm_is_refused_when_it_is_named():
    def ask(world):
        with pytest.raises(ValueError, match="algorithm='rign' is unknown; use"):
            world.using("rign")

    minipar.run(ask, world_size=1)
