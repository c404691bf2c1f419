"""Bytes and messages of every algorithm, to the last one, against the formulas of the docstrings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm.transport.traffic import Traffic
from tests.comm.cases import case, cases, failures
from tests.comm.sent import FORMULAS, messages
from tests.examples import examples

NAMES = list(FORMULAS)


def booked(world, drawn):
    """What this rank's ledger says of each case: bytes, messages, and the kinds they were sent as."""
    said = []
    for one in drawn:
        world.traffic.reset()
        assert not failures(world, [one])
        ledger = world.traffic
        said.append((ledger.sent_bytes, ledger.messages, dict(ledger.by_kind)))
    return said


def kind(one):
    return "native" if one.algorithm == "native" else one.collective


@examples(40)
@given(st.data())
def test_every_algorithm_sends_what_its_docstring_says(data):
    size = data.draw(st.integers(1, 8))
    drawn = data.draw(st.lists(cases(size, NAMES), min_size=12, max_size=20))
    for rank, said in enumerate(minipar.run(booked, drawn, world_size=size)):
        for one, (sent_bytes, count, by_kind) in zip(drawn, said):
            want = messages(one, rank, size)
            assert sent_bytes == sum(want) == sum(by_kind.values()), (rank, one)
            if one.algorithm != "native":
                assert count == len(want), (rank, one)
            if one.algorithm != "hierarchical":
                assert set(by_kind) <= {kind(one)}, (rank, one)


def test_two_levels_are_booked_as_the_collectives_that_they_are():
    def by_kind(world):
        world.all_reduce(torch.zeros(12, dtype=torch.uint8), algorithm="hierarchical")
        return dict(world.traffic.by_kind)

    # nodes of 2: half of x inside, and (3-1)/3 of that half across; and both again
    want = {"reduce_scatter": 6 + 4, "all_gather": 4 + 6}
    assert minipar.run(by_kind, world_size=6) == [want] * 6


@given(st.integers(1, 8), st.integers(0, 50))
@examples(15)
def test_a_ring_sends_exactly_its_share_where_the_ranks_divide(size, rows):
    n = rows * size

    def shares(world):
        x, sent = torch.zeros(n, dtype=torch.float64), []
        for name, argument in (("all_reduce", x), ("reduce_scatter", x), ("all_gather", x[:rows])):
            world.traffic.reset()
            getattr(world, name)(argument, algorithm="ring")
            sent.append(world.traffic.sent_bytes)
        return sent

    share = (size - 1) * n // size * 8
    for sent in minipar.run(shares, world_size=size):
        assert sent == [2 * share, share, share]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_halving_doubling_sends_ring_bytes_on_powers_of_two(size):
    def sent(world):
        counts = []
        for algorithm in ("ring", "halving_doubling", "doubling"):
            world.traffic.reset()
            world.all_reduce(torch.zeros(8 * size), algorithm=algorithm)
            counts.append((world.traffic.sent_bytes, world.traffic.messages))
        return counts

    steps = size.bit_length() - 1
    for ring, halving, doubling in minipar.run(sent, world_size=size):
        assert ring == (2 * (size - 1) * 32, 2 * (size - 1))
        assert halving == (2 * (size - 1) * 32, 2 * steps)
        assert doubling == (steps * 32 * size, steps)


def test_what_a_subgroup_sends_is_booked_on_the_comm_it_was_made_from():
    def ledgers(world):
        first = world.rank // 2 * 2
        pair = world.subgroup([first + 1, first], "pair")
        inner = pair.subgroup([pair.rank], "alone")
        inner.all_reduce(torch.zeros(4))
        pair.exchange(torch.zeros(3), 1 - pair.rank, (3,), torch.float32, 1 - pair.rank)
        pair.all_reduce(torch.zeros(4), algorithm="ring")
        return [(t.sent_bytes, dict(t.by_kind)) for t in (world.traffic, pair.traffic, inner.traffic)]

    for world, pair, inner in minipar.run(ledgers, world_size=4):
        assert world == pair == (28, {"exchange": 12, "all_reduce": 16})
        assert inner == (0, {})


def test_two_subgroups_of_the_same_ranks_keep_ledgers_of_their_own():
    def ledgers(world):
        a, b = world.subgroup([0, 1], "a"), world.subgroup([0, 1], "b")
        a.all_reduce(torch.zeros(4), algorithm="ring")
        return a.traffic.sent_bytes, b.traffic.sent_bytes, world.traffic.sent_bytes

    assert minipar.run(ledgers, world_size=2) == [(16, 0, 16)] * 2


@pytest.mark.parametrize(("size", "steps"), [(1, 0), (2, 1), (3, 2), (5, 3), (8, 3)])
def test_a_barrier_sends_a_byte_in_each_of_ceil_log_p_steps(size, steps):
    def sent(world):
        world.barrier()
        return world.traffic.sent_bytes, world.traffic.messages

    assert minipar.run(sent, world_size=size) == [(steps, steps)] * size


def test_an_empty_tensor_is_no_message():
    def sent(world):
        world.send(torch.zeros(0, 3), 1 - world.rank)
        received = world.recv((0, 3), torch.float32, 1 - world.rank)
        return world.traffic.messages, received.shape

    assert minipar.run(sent, world_size=2) == [(0, (0, 3))] * 2


def test_a_ledger_says_what_it_holds():
    ledger = Traffic()
    inner = Traffic(ledger)
    inner.book("send", 5)
    ledger.book("all_reduce", 7)
    assert repr(inner) == "Traffic(5 bytes in 1 messages: send 5)"
    assert repr(ledger) == "Traffic(12 bytes in 2 messages: send 5, all_reduce 7)"
    ledger.reset()
    assert repr(ledger) == "Traffic(0 bytes in 0 messages: nothing sent)"
    assert ledger.sent_bytes == 0
    assert inner.sent_bytes == 5


def test_a_wrong_formula_would_be_noticed():
    """The check above goes red where a rank sends one chunk more than its share, as a naive ring all-gather does."""
    gathered = case("all_gather", "ring", (5,), torch.float32)

    def naive(world):
        world.traffic.reset()
        chunk = torch.zeros(5)
        for _ in range(world.size):  # one step too many: everybody's own chunk comes back
            chunk = world.exchange(
                chunk, (world.rank + 1) % world.size, (5,), chunk.dtype, (world.rank - 1) % world.size
            )
        return world.traffic.sent_bytes

    for rank, sent in enumerate(minipar.run(naive, world_size=3)):
        assert sent != sum(messages(gathered, rank, 3))
