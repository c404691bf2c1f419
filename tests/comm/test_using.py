"""A Comm that carries an algorithm: the same ranks, stream and ledger, another meaning of "auto"."""

import pytest
import torch

import minipar


def messages_and_bytes(world) -> tuple:
    """Of a ring's all-reduce, of one on its subgroup, and of the usual one: for so few bytes, in fewer messages."""
    ring, x = world.using("ring"), torch.ones(8, dtype=torch.float64)
    assert torch.equal(ring.all_reduce(x), world.all_reduce(x))
    world.traffic.reset()
    ring.all_reduce(x)
    by_ring, messages = world.traffic.sent_bytes, [world.traffic.messages]
    inner = ring.subgroup(range(world.size), "inner")
    inner.all_reduce(x)
    by_inner = world.traffic.sent_bytes - by_ring
    messages.append(world.traffic.messages)
    assert ring.using("auto").default_algorithm is None
    ring.using("auto").all_reduce(x)
    messages.append(world.traffic.messages)
    ring.all_to_all(x)  # has no ring: as without
    assert world.traffic.sent_bytes > by_ring + by_inner
    return by_ring, by_inner, messages


def test_its_collectives_and_its_subgroups_take_the_algorithm_it_carries():
    for by_ring, by_inner, messages in minipar.run(messages_and_bytes, world_size=4):
        assert (by_ring, by_inner) == (96, 96)  # other algorithms send as much
        assert messages[:2] == [6, 12]
        assert messages[2] < 18


def test_an_unknown_algorithm_is_refused_when_it_is_named():
    def ask(world):
        with pytest.raises(ValueError, match="algorithm='rign' is unknown; use"):
            world.using("rign")

    minipar.run(ask, world_size=1)
