"""Python values, gathered and broadcast: every rank has the right ones, and sends the bytes that the docstrings state."""

import pickle

import pytest

import minipar
from minipar.comm.objects import all_gather_objects, broadcast_object, gather_objects


def value(rank):
    """A value whose pickle has another length on every rank."""
    return {"rank": rank, "text": "x" * (10 * rank)}


def length(rank):
    return len(pickle.dumps(value(rank)))


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_every_value(size):
    got = minipar.run(lambda world: all_gather_objects(world, value(world.rank)), world_size=size)
    assert got == [[value(rank) for rank in range(size)]] * size


@pytest.mark.parametrize("root", [None, 2])
def test_only_the_root_gets_all_values_and_others_send_once(root):
    def gathered(world):
        world.traffic.reset()
        values = gather_objects(world, value(world.rank), *[root][: root is not None])
        return values, world.traffic.sent_bytes

    for rank, (values, sent_bytes) in enumerate(minipar.run(gathered, world_size=3)):
        is_root = rank == (root or 0)
        assert values == ([value(0), value(1), value(2)] if is_root else None)
        assert sent_bytes == 2 * 8 + (
            0 if is_root else length(rank)
        )  # the all-gather of the lengths, then its value


@pytest.mark.parametrize("root", [None, 2])
def test_every_rank_gets_the_roots_value_and_only_its_bytes_are_sent(root):
    def received(world):
        world.traffic.reset()
        got = broadcast_object(world, value(world.rank), *[root][: root is not None])
        return got, world.traffic.sent_bytes

    got, sent_bytes = zip(*minipar.run(received, world_size=3))
    assert got == (value(root or 0),) * 3
    assert sum(sent_bytes) == 2 * (8 + length(root or 0))  # each of the other two ranks receives both once
