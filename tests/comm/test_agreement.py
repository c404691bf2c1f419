"""What must be equal on all ranks is compared by a digest; a difference is told by name, the same on every rank."""

import pytest

import minipar
from minipar.comm.agreement import DIGEST_BYTES, require_equal


def outcome(world, entries_of):
    world.traffic.reset()
    try:
        require_equal(world, "sizes", entries_of(world.rank), "give all ranks one model")
    except ValueError as error:
        return str(error)
    return world.traffic.sent_bytes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_entries_pass_and_cost_one_digest(size):
    sent = minipar.run(outcome, lambda rank: {"a": (4, 4), "b": 1}, world_size=size)
    assert sent == [DIGEST_BYTES * (size - 1)] * size


@pytest.mark.parametrize(
    ("entries_of", "said"),
    [
        (lambda rank: {"a": 1, "b": 2 if rank < 2 else 3}, "b is 2 on rank 0, and 3 on rank 2"),
        (lambda rank: {"a": 1, "b": 2} if rank < 2 else {"a": 1}, "b is 2 on rank 0, and missing on rank 2"),
        (lambda rank: {"a": 1} | ({"b": 2} if rank else {}), "b is missing on rank 0, and 2 on rank 1"),
        (
            lambda rank: {"a": 1, "b": 2} if rank < 2 else {"b": 2, "a": 1},
            "in their order, rank 0 has a where rank 2 has b",
        ),
    ],
)
def test_a_difference_is_told_by_name_on_every_rank(entries_of, said):
    told = minipar.run(outcome, entries_of, world_size=3)
    assert told == [f"the ranks' sizes differ: {said}; give all ranks one model"] * 3
