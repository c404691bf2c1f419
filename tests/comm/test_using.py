"""A Comm that carries an algorithm: the same ranks, stream and ledger, another meaning of "auto"."""

import pytest
import torch

import minipar


def kinds_and_bytes(world) -> tuple:
    ring, x = world.using("ring"), torch.ones(8, dtype=torch.float64)
    assert torch.equal(ring.all_reduce(x), world.all_reduce(x))
    world.traffic.reset()
    ring.all_reduce(x)
    by_ring = world.traffic.sent_bytes
    inner = ring.subgroup(range(world.size), "inner")
    inner.all_reduce(x)
    by_inner = world.traffic.sent_bytes - by_ring
    assert ring.using("auto").default_algorithm is None
    ring.using("auto").all_reduce(x)
    ring.all_to_all(x)  # has no ring: as without
    return by_ring, by_inner, world.traffic.sent_bytes > by_ring + by_inner


def test_its_collectives_and_its_subgroups_take_the_algorithm_it_carries():
    assert minipar.run(kinds_and_bytes, world_size=4) == [(96, 96, True)] * 4


def test_an_unknown_algorithm_is_refused_when_it_is_named():
    def ask(world):
        with pytest.raises(ValueError, match="algorithm='rign' is unknown; use"):
            world.using("rign")

    minipar.run(ask, world_size=1)
