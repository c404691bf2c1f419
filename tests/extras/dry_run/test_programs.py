"""What is sent or called by one rank alone, or otherwise than by another, is named; what works is not."""

import pytest
import torch

from minipar.extras.dry_run.programs import run_ranks


def faults(size, program):
    return run_ranks(size, lambda world, _: program(world)).faults


def skips(world):
    if world.rank != 1:
        world.all_reduce(torch.zeros(8))
    world.all_gather(torch.zeros(8))


def stops_early(world):
    world.all_gather(torch.zeros(8))
    if world.rank != 1:
        world.all_reduce(torch.zeros(8))


def other_order(world):
    calls = [lambda: world.all_reduce(torch.zeros(8)), lambda: world.broadcast(torch.zeros(8))]
    for call in calls if world.rank else reversed(calls):
        call()


def other_shape(world):
    world.all_reduce(torch.zeros(16 if world.rank == 2 else 8))


def wrong_peer(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 2)
    if world.rank == 1:
        world.recv((4,), torch.float32, 0)


def wrong_size(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 1)
    if world.rank == 1:
        world.recv((5,), torch.float32, 0)


def never_received(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 1, async_op=True)


def waits_for_a_number_nobody_sends(world):
    if world.rank == 0:
        world.recv((1,), torch.int64, 1)


def wait_for_numbers_in_a_circle(world):
    world.recv((1,), torch.int64, 1 - world.rank)
    world.send(torch.zeros(1, dtype=torch.int64), 1 - world.rank)


def raises(world):
    if world.rank == 1:
        raise KeyError("lost")
    world.all_reduce(torch.zeros(8))


@pytest.mark.parametrize(
    ("program", "size", "words"),
    [
        (skips, 4, "collective 1 on comm 'world': rank 1 calls all_gather, and rank 0 calls all_reduce sum of [8]"),
        (stops_early, 4, "collective 2 on comm 'world': rank 1 calls no more, and rank 0 calls all_reduce"),
        (other_order, 4, "collective 1 on comm 'world': rank 1 calls all_reduce sum of [8], and rank 0 calls broadcast"),
        (other_shape, 4, "rank 2 calls all_reduce sum of [16], and rank 0 calls all_reduce sum of [8]"),
        (wrong_peer, 3, "message 0 on comm 'world': rank 0 sends 16 bytes (float32) to rank 2, and rank 2 receives"),
        (wrong_size, 2, "rank 0 sends 16 bytes (float32) to rank 1, and rank 1 receives 20 bytes (float32)"),
        (never_received, 2, "rank 0 sends 16 bytes (float32) to rank 1, and rank 1 receives nothing"),
        (waits_for_a_number_nobody_sends, 2, "rank 1 sends nothing to rank 0, and rank 0 receives 8 bytes (int64)"),
        (wait_for_numbers_in_a_circle, 2, "rank 0 waits for whole numbers: no other rank goes on"),
        (raises, 3, "rank 1 raises KeyError: 'lost'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_planted_fault_is_named(program, size, words):
    assert faults(size, program)[0].startswith(words) or words in faults(size, program)[0]


def between_stages(world):
    """The first half of the ranks sends four numbers to the other half, which expects five."""
    if world.rank < world.size // 2:
        world.send(torch.zeros(4), world.rank + world.size // 2)
    else:
        world.recv((5,), torch.float32, world.rank - world.size // 2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda world: world.all_reduce(torch.zeros(8 + world.rank // 4)),
         "rank 4 calls all_reduce sum of [9], and rank 0 calls all_reduce sum of [8]"),
        (between_stages, "rank 0 sends 16 bytes (float32) to rank 4, and rank 4 receives 20 bytes (float32)"),
        (lambda world: world.send(torch.zeros(4), 4) if world.rank == 0 else None,
         "rank 0 sends 16 bytes (float32) to rank 4, and rank 4 receives nothing"),
        (lambda world: raises(world) if world.rank == 1 else None, ""),
    ],
    ids=["other_shape", "wrong_size", "wrong_peer", "of a rank that is not run"],
)  # fmt: skip
def test_a_fault_is_named_if_its_ranks_are_run(program, words):
    """Ranks 0 and 4 are run, each in place of four. What the others send each other is not seen, as the report says."""
    found = run_ranks(8, lambda world, _: program(world), (0,) * 4 + (4,) * 4).faults
    assert words in found[0] if words else not found


def test_integers_of_a_rank_that_is_not_run_are_its_firsts():
    def gathers(world):
        lengths = world.all_gather(torch.tensor([1 + world.rank])).tolist()
        return world.all_gather(torch.full((lengths[world.rank],), world.rank), sizes=lengths).tolist()

    done = run_ranks(6, lambda world, _: gathers(world), (0, 0, 0, 3, 3, 3))
    assert done.faults == []
    assert done.results == dict.fromkeys((0, 3), [0] * 3 + [3] * 12)


def test_what_works_is_not_a_fault():
    def works(world):
        world.all_reduce(torch.zeros(8))
        handle = world.all_reduce(torch.ones(3), async_op=True)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        world.exchange(torch.zeros(4), right, (4,), torch.float32, left)
        lengths = world.all_gather(torch.tensor([world.rank])).tolist()  # whole numbers are delivered
        world.all_gather(torch.zeros(world.rank), sizes=lengths)
        handle.wait()
        return lengths

    done = run_ranks(3, lambda world, _: works(world))
    assert done.faults == []
    assert done.results == {rank: [0, 1, 2] for rank in range(3)}
