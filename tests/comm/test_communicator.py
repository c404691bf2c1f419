"""Messages between two ranks, subgroups, and Comms on somebody else's process group."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import Comm
from minipar.support.errors import RankError
from tests.comm.cases import cases, failures
from tests.examples import examples
from tests.strategies import dtypes, seeds, shapes


def numbers(shape, dtype, seed):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    st.integers(1, 8), st.lists(st.tuples(shapes(), dtypes, seeds), min_size=1, max_size=8), st.integers(0, 7)
)
@examples(20)
def test_exchange_hands_every_rank_its_neighbours_tensor(size, tensors, shift):
    """By any shift, to oneself too, and strided tensors; what was sent is not written to."""

    def wrong(world):
        to, source, bad = (world.rank + shift) % world.size, (world.rank - shift) % world.size, []
        for shape, dtype, seed in tensors:
            x = torch.stack([numbers(shape, dtype, seed + world.rank)] * 2, dim=-1)[..., 0]
            y = world.exchange(x, to, shape, dtype, source)
            if not torch.equal(y, numbers(shape, dtype, seed + source)) or not torch.equal(
                x, numbers(shape, dtype, seed + world.rank)
            ):
                bad.append((shape, dtype))
        return bad

    assert minipar.run(wrong, world_size=size) == [[]] * size


def test_a_line_has_ends():
    def received(world):
        to = world.rank + 1 if world.rank + 1 < world.size else None
        source = world.rank - 1 if world.rank else None
        return world.exchange(torch.tensor([world.rank]), to, (1,), torch.int64, source)

    assert minipar.run(received, world_size=3) == [None, torch.tensor([0]), torch.tensor([1])]


@pytest.mark.tagged("on both ranks a send waits behind receives, which NCCL takes in order")
@pytest.mark.parametrize("busy", [False, True], ids=["idle stream", "behind an operation"])
def test_messages_between_two_ranks_arrive_in_send_order(busy):
    def received(world):
        other, n, begin = 1 - world.rank, 50, threading.Event()
        earlier = world.custom("earlier", begin.wait, async_op=True) if busy else begin
        handles = [world.recv((1,), torch.int64, other, async_op=True) for _ in range(n)]
        sends = [world.send(torch.tensor([i]), other, async_op=True) for i in range(n)]
        begin.set()
        earlier.wait()
        got = [handle.wait().item() for handle in handles]
        assert [handle.wait() for handle in sends] == [None] * n
        return got

    assert minipar.run(received, world_size=2) == [list(range(50))] * 2


def test_a_send_that_does_not_wait_can_meet_one_that_does():
    def received(world):
        if world.rank == 0:
            handle = world.send(torch.arange(3), 1, async_op=True)
            answer = world.recv((3,), torch.int64, 1)
            handle.wait()
            return answer.tolist()
        x = world.recv((3,), torch.int64, 0)
        world.send(x * 2, 0)
        return x.tolist()

    assert minipar.run(received, world_size=2) == [[0, 2, 4], [0, 1, 2]]


def test_what_is_received_lands_where_the_caller_wants_it():
    def received(world):
        memory = torch.zeros(6)
        other = 1 - world.rank
        world.exchange(torch.ones(2), other, (2,), torch.float32, other, out=memory[2:4])
        return memory.tolist()

    assert minipar.run(received, world_size=2) == [[0, 0, 1, 1, 0, 0]] * 2


def test_received_tensors_ignore_torchs_default_device():
    def received(world):
        other, x = 1 - world.rank, torch.ones(2, device=world.device)
        with torch.device("meta"):
            exchanged = world.exchange(x, other, (2,), x.dtype, other)
            if world.rank == 0:
                return world.send(x, 1)
            return {y.device == world.device for y in (exchanged, world.recv((2,), x.dtype, 0))}

    assert minipar.run(received, world_size=2) == [None, {True}]


# Subgroups ------------------------------------------------------------------------------------------------------


@examples(15)
@given(st.data())
def test_collectives_are_right_in_subgroups_of_subgroups_in_any_order(data):
    """Two levels of groups, each in an order of its own, all of them at work at once."""
    size = data.draw(st.integers(2, 8))
    order = data.draw(st.permutations(range(size)))
    cut = data.draw(st.integers(1, size - 1))
    groups = [order[:cut], order[cut:]]
    drawn = [data.draw(st.lists(cases(len(group)), min_size=2, max_size=4)) for group in groups]
    inner = [data.draw(st.permutations(range(len(group)))) for group in groups]

    def wrong(world):
        mine = [world.rank in group for group in groups].index(True)
        group = world.subgroup(groups[mine], "half")
        again = group.subgroup(inner[mine], "shuffled")
        assert group.ranks == tuple(groups[mine])
        assert again.ranks == tuple(groups[mine][i] for i in inner[mine])
        assert world.ranks[again.ranks[again.rank]] == world.rank
        return failures(group, drawn[mine]) + failures(again, drawn[mine])

    assert minipar.run(wrong, world_size=size) == [[]] * size


@pytest.mark.tagged("making a communicator takes messages, and 200 of them long")
def test_a_subgroup_is_free_of_messages():
    def sent(world):
        for i in range(200):
            world.subgroup(range(world.size), f"g{i}").subgroup([world.rank], "alone")
        return world.traffic.messages

    assert minipar.run(sent, world_size=4) == [0] * 4


def test_messages_of_two_subgroups_of_the_same_ranks_do_not_meet():
    def received(world):
        a, b = world.subgroup([0, 1], "a"), world.subgroup([0, 1], "b")
        if world.rank == 0:
            handles = [c.send(torch.tensor([i]), 1, async_op=True) for i, c in enumerate((a, b))]
            return [handle.wait() for handle in handles]
        return [b.recv((1,), torch.int64, 0).item(), a.recv((1,), torch.int64, 0).item()]

    assert minipar.run(received, world_size=2)[1] == [1, 0]


def subgroups_of_one_name(world):
    """Of ranks (0, 1) and (0, 1, 2), made in another order on each rank."""
    if world.rank == 0:
        pair = world.subgroup([0, 1], "x")
    every = world.subgroup([0, 1, 2], "x")
    if world.rank == 1:
        pair = world.subgroup([0, 1], "x")
    return pair if world.rank < 2 else None, every


@pytest.mark.tagged("groups made in another order on each rank, which NCCL waits in for ever")
def test_subgroups_of_one_name_are_told_apart_by_their_ranks():
    """Theirs are other messages, and other counts: three through one and one through the other is no surplus."""

    def received(world):
        pair, every = subgroups_of_one_name(world)
        if world.rank == 0:
            sent = [pair.send(torch.tensor([i]), 1, async_op=True) for i in (1, 2, 3)]
            sent += [every.send(torch.tensor([4]), 1, async_op=True)]
            return [handle.wait() for handle in sent]
        return [comm.recv((1,), torch.int64, 0).item() for comm in (every, pair, pair, pair)] if pair else []

    assert minipar.run(received, world_size=3) == [[None] * 4, [4, 1, 2, 3], []]


@pytest.mark.tagged("groups made in another order on each rank, which NCCL waits in for ever")
def test_same_named_comms_do_not_mask_an_unreceived_message():
    def leaves_one(world):
        pair, every = subgroups_of_one_name(world)
        if world.rank == 0:
            pair.send(torch.ones(3), 1, async_op=True)
            every.recv((3,), torch.float32, 1)
        elif world.rank == 1:
            every.send(torch.ones(3), 0)

    with pytest.raises(
        RankError, match="rank 0 sent 1 message to rank 1 on comm 'world/x' that was not received"
    ):
        minipar.run(leaves_one, world_size=3)


def test_a_group_of_one_sends_nothing():
    def results(world):
        alone, x = world.subgroup([world.rank], "alone"), torch.arange(4.0)
        kept = [alone.all_reduce(x), alone.all_gather(x), alone.reduce_scatter(x), alone.all_to_all(x)]
        kept += [alone.broadcast(x), alone.reduce(x), alone.all_reduce_(x.clone(), "mean")]
        alone.barrier()
        return all(torch.equal(y, x) and y is not x for y in kept), world.traffic.messages

    assert minipar.run(results, world_size=2) == [(True, 0)] * 2


# Other people's process groups ----------------------------------------------------------------------------------


def test_a_process_group_somebody_else_made_is_a_world():
    def result(world):
        comm = Comm.from_process_group(world.process_group(), node_size=2)
        total = comm.all_reduce(torch.tensor([comm.rank]), algorithm="hierarchical")
        assert "watch" not in {thread.name for thread in threading.enumerate()}, "that is for GPUs"
        return comm.ranks, comm.rank, comm.node_size, total.item()

    want = [((0, 1, 2, 3), rank, 2, 6) for rank in range(4)]
    assert minipar.run(result, world_size=4) == want


@pytest.mark.tagged("on both ranks a receive waits behind a send, which NCCL takes in order")
def test_two_worlds_on_one_process_group_never_mix_messages():
    """Same ranks, same names, same numbers of messages; received in the other order than they were sent."""

    def received(world):
        a, b = (Comm.from_process_group(world.process_group()) for _ in range(2))
        pairs = [(a, b), tuple(comm.subgroup([1, 0], "x") for comm in (a, b))]
        got = []
        for first, second in pairs:
            other = 1 - first.rank
            handles = [c.send(torch.tensor([i]), other, async_op=True) for i, c in ((1, first), (2, second))]
            got += [c.recv((1,), torch.int64, other).item() for c in (second, first)]
            handles += [first.all_reduce(torch.tensor([10]), async_op=True)]
            got += [second.all_reduce(torch.tensor([20])).item(), handles.pop().wait().item()]
            assert [handle.wait() for handle in handles] == [None, None]
        return got

    assert minipar.run(received, world_size=2) == [[2, 1, 40, 20] * 2] * 2


@pytest.mark.parametrize(
    ("node_size", "size", "is_"), [(2, 4, 2), (4, 4, None), (3, 4, None), (None, 4, None)]
)
def test_the_node_size_counts_only_where_it_cuts_the_group(node_size, size, is_):
    def known(world):
        return Comm.from_process_group(world.process_group(), node_size=node_size).node_size

    assert minipar.run(known, world_size=size) == [is_] * size


def test_a_group_knows_how_many_of_its_neighbours_share_a_node():
    """Eight ranks on two nodes: (0, 1, 2, 3) and (4, 5, 6, 7)."""
    groups = {
        (0, 1, 4, 5): 2,
        (0, 2, 4, 6): 2,
        (0, 4, 1, 5): None,
        (0, 4): None,
        (0, 1, 2): None,
        (0, 1, 2, 4): None,
    }

    def sizes(world):
        world = Comm.from_process_group(world.process_group(), node_size=4)
        return {ranks: world.subgroup(ranks, "some").node_size for ranks in groups if world.rank in ranks}

    assert minipar.run(sizes, world_size=8)[0] == groups


# What goes wrong between two ranks ------------------------------------------------------------------------------


def receives_too_much(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 1)
    else:
        world.recv((5,), torch.float32, 0)


def leaves_a_message(world):
    if world.rank == 0:
        world.send(torch.zeros(4), 1, async_op=True)


def asks_in_vain(world):
    if world.rank == 0:
        world.recv((4,), torch.float32, 1, async_op=True)


def receives_another_dtype(world):
    if world.rank == 0:
        world.send(torch.tensor([1.5, 2.5]), 1)
    else:
        world.recv((1,), torch.int64, 0)


def sums_here_and_takes_the_largest_there(world):
    world.all_reduce(torch.ones(1), "sum" if world.rank else "max")


def gathers_here_and_sums_there(world):
    world.all_reduce(torch.ones(1)) if world.rank else world.all_gather(torch.ones(1))


def exchanges_here_and_sums_there(world):
    x = torch.ones(1)
    world.all_reduce(x) if world.rank else world.exchange(x, 1, (1,), x.dtype, 1)


def everybody_sends_first(world):
    world.send(torch.zeros(1 << 20), (world.rank + 1) % world.size)
    return world.recv((1 << 20,), torch.float32, (world.rank - 1) % world.size)


@pytest.mark.sampled(8)
@pytest.mark.tagged("its words; those of the grouped one are in test_checked.py")
@pytest.mark.parametrize(
    ("function", "size", "words"),
    [
        (
            receives_too_much,
            2,
            r"send 16 bytes to rank 1.*receive with 20 bytes|receive 20 bytes from rank 0.*16",
        ),
        (leaves_a_message, 2, r"rank 0 sent 1 message to rank 1 on comm 'world' that was not received"),
        (asks_in_vain, 2, r"rank 0 asked rank 1 for 1 message on comm 'world' that was not sent"),
        (
            receives_another_dtype,
            2,
            r"float32, message 0\), but rank 1 expects 8 bytes of int64",
        ),
        (sums_here_and_takes_the_largest_there, 2, r"all_reduce max float32.* of all_reduce sum float32"),
        (gathers_here_and_sums_there, 2, r"all_gather float32.* expects 4 bytes of all_reduce sum float32"),
        (exchanges_here_and_sums_there, 2, r"\(float32, message 0\), but rank \d is blocked itself"),
        (everybody_sends_first, 3, r"deadlock: rank 0 waits to send 4194304 bytes to rank 1"),
    ],
)
def test_a_mismatched_message_is_an_error_naming_both_ranks(function, size, words):
    """Among them the ring of blocking sends, and each well before the deadline of a minute."""
    with pytest.raises(RankError, match=words):
        minipar.run(function, world_size=size)


def told_of(world):
    """What each operation is called while it runs, and the bytes by kind."""
    called, x = [], torch.ones(world.size, dtype=torch.uint8)
    note = lambda: called.append(world.running)  # noqa: E731
    with world.saying("a bucket"):
        world.custom("noted", note)
    world.custom("noted", note)
    world.all_reduce(x, algorithm="ring")
    world.exchange(x, 1 - world.rank, x.shape, x.dtype, 1 - world.rank)
    return called, dict(world.traffic.by_kind), world.running


def test_what_a_collective_is_called_ends_with_it():
    told = minipar.run(told_of, world_size=2)
    assert told == [(["noted of a bucket", "noted"], {"all_reduce": 2, "exchange": 2}, "")] * 2
