"""The simulated network: what messages and computing take, whose memory a value is in, and what a program can't do."""

from fractions import Fraction

import pytest

from minipar.learn.puzzles import collectives
from minipar.learn.puzzles.network import Network, World
from minipar.learn.puzzles.values import Fault, Memory, Value, parts_of

ALPHA_S, BETA_S = 1.0, 0.5
MB = 1


def ran(program, num_ranks=2, num_bytes=4 * MB, **network):
    """Run `program(comm, value)` on every rank; return the world and the results."""
    world = World(num_ranks, Network(ALPHA_S, BETA_S, **network))

    def value(rank):
        return Value(
            world.memories[rank], "x", [(i, parts_of(f"rank {rank}")) for i in range(2)], num_bytes // 2
        )

    tasks = [world.start(program(world.comms[rank], value(rank)), rank) for rank in range(num_ranks)]
    world.run()
    return world, [task.result for task in tasks]


def test_a_message_takes_alpha_and_beta_times_its_bytes():
    async def program(comm, x):
        if comm.rank == 0:
            await comm.send(x, 1)
        else:
            return await comm.recv(0)

    world, (_, got) = ran(program)
    assert world.now_s == ALPHA_S + 4 * BETA_S
    assert world.sent_bytes == [4, 0]
    assert (got.rank, got.blocks[0][1]) == (1, parts_of("rank 0"))


def test_a_card_sends_one_message_after_another_and_receives_so():
    async def to_zero(comm, x):
        if comm.rank:
            await comm.send(x, 0)
        else:
            for other in (1, 2):
                await comm.recv(other)

    async def from_zero(comm, x):
        if comm.rank:
            await comm.recv(0)
        else:
            for other in (1, 2):
                await comm.send(x, other)

    assert ran(to_zero, 3)[0].now_s == ALPHA_S + 2 * 4 * BETA_S  # the two alphas pass together
    assert ran(from_zero, 3)[0].now_s == 2 * (ALPHA_S + 4 * BETA_S)


def test_a_message_travels_while_the_program_computes():
    async def program(comm, x):
        await comm.send(x, 1 - comm.rank)
        await comm.compute(10)
        await comm.recv(1 - comm.rank)

    assert ran(program)[0].now_s == 10


def test_two_computations_of_a_rank_follow_each_other():
    async def program(comm, x):
        handles = [comm.start(comm.compute(3)) for _ in range(2)]
        for handle in handles:
            await handle

    assert ran(program)[0].now_s == 6


def test_messages_in_a_node_are_faster():
    async def program(comm, x):
        if comm.rank == 0:
            await comm.send(x, 1)
            await comm.send(x, 2)
        elif comm.rank < 3:
            await comm.recv(0)

    assert ran(program, 4, node_size=2, node_speedup=4)[0].now_s == 3 / 4 + 3


def test_memory_is_what_variables_refer_to():
    async def program(comm, x):
        await comm.compute(1)  # 4 bytes
        y = x + x
        await comm.compute(1)  # 8
        half = y.chunks(2)[0]
        del y
        await comm.compute(1)  # 8: the view keeps the whole
        del half
        await comm.compute(1)  # 4
        return None

    world, _ = ran(program, 1)
    assert [held for _, held, _ in world.memories[0].history] == [4, 8, 8, 4, 0]
    assert world.memories[0].peak()[1] == 8


def test_a_received_message_is_in_the_receivers_memory():
    async def program(comm, x):
        if comm.rank == 0:
            await comm.send(x, 1)
            return None
        y = await comm.recv(0)
        await comm.compute(1)
        return y.rank

    world, (_, rank) = ran(program)
    assert rank == 1
    assert [memory.peak()[1] for memory in world.memories] == [4, 8]
    assert [memory.held_bytes for memory in world.memories] == [0, 0]


def test_tags_keep_messages_apart():
    async def program(comm, x):
        if comm.rank == 0:
            await comm.send(x * 2, 1, tag="b")
            await comm.send(x, 1, tag="a")
        else:
            return [await comm.recv(0, tag="a"), await comm.recv(0, tag="b")]

    first, second = ran(program)[1][1]
    assert [value.blocks[0][1]["rank 0"] for value in (first, second)] == [1, 2]


@pytest.mark.parametrize(("num_ranks", "group"), [(1, (0,)), (2, (0, 1)), (4, (1, 3)), (4, (3, 1))])
def test_ready_made_collectives_give_the_sum_on_every_rank(num_ranks, group):
    async def program(comm, x):
        if comm.rank in group:
            total, again = [comm.start(comm.all_reduce(x, group)) for _ in range(2)]
            return await total, await again

    async def allowed(comm, x):
        comm.collectives = collectives
        return await program(comm, x)

    world, results = ran(allowed, num_ranks)
    for rank in group:
        for value in results[rank]:
            assert value.indices == (0, 1)
            assert all(parts == parts_of(*(f"rank {r}" for r in group)) for _, parts in value.blocks)
    assert max(world.sent_bytes) == 2 * 2 * (len(group) - 1) / len(group) * 4


def test_values_add_divide_and_say_what_does_not_fit():
    memory = Memory(0)
    x, y = (Value(memory, "gradient", [(0, parts_of(f"rank {r}"))], 1) for r in range(2))
    mean = sum([x, y]) / 2
    assert mean.blocks == ((0, {"rank 0": Fraction(1, 2), "rank 1": Fraction(1, 2)}),)
    for wrong, words in (
        (lambda: x + 3, "only values can be added"),
        (lambda: x + Value(memory, "weights", [(0, {})], 1), "adds the weights to the gradient"),
        (lambda: x + Value(memory, "gradient", [(1, {})], 1), "different elements"),
        (lambda: x + Value(Memory(1), "gradient", [(0, {})], 1), "value of rank 1 on rank 0"),
        (lambda: x.chunks(2), "does not cut"),
        (lambda: x / 0, "divides"),
    ):
        with pytest.raises(Fault, match=words):
            wrong()
