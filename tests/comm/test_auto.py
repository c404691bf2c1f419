""" "auto": never more bytes than a ring, one order of additions for a reduce-scatter and an all-reduce."""

from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import collectives
from minipar.comm.collectives import ALGORITHMS, SHORT_BYTES_PER_RANK, choose
from minipar.support.chunks import chunk_sizes
from tests.comm.cases import NAMES, case, cases, failures
from tests.comm.sent import messages
from tests.examples import examples
from tests.strategies import seeds

FLOAT = 4
SHORT = SHORT_BYTES_PER_RANK // FLOAT  # elements a rank from which on a vector is no longer short
SUMS = ("all_reduce", "reduce_scatter")
SIZES = (2, 3, 4, 5, 6, 8)


@given(st.integers(1, 64), st.integers(0, 1 << 26))
def test_every_choice_is_an_algorithm_of_its_collective(size, num_bytes):
    for collective in ALGORITHMS:
        assert (collective, choose(collective, size, num_bytes)) in NAMES


@pytest.mark.parametrize(
    ("collective", "size", "num_bytes", "below", "from_there"),
    [
        ("all_reduce", 2, 8 << 20, "doubling", "halving_doubling"),
        ("all_reduce", 3, 3 * 16, "doubling", "ring"),
        ("all_reduce", 4, 4 * 16, "doubling", "halving_doubling"),
        ("all_reduce", 4, 1 << 20, "halving_doubling", "ring"),
        ("reduce_scatter", 3, 3 * 16, "halving_doubling", "ring"),
        ("reduce_scatter", 4, 1 << 20, "halving_doubling", "ring"),
        ("reduce", 3, 32 << 20, "tree", "ring"),
        ("broadcast", 3, 32 << 20, "tree", "ring"),
    ],
)
def test_the_algorithm_changes_at_its_number_of_bytes(collective, size, num_bytes, below, from_there):
    assert choose(collective, size, num_bytes - 1) == below
    assert choose(collective, size, num_bytes) == from_there


@pytest.mark.parametrize("size", [*SIZES, 7, 12, 64, 1000])
def test_auto_sends_no_more_than_a_ring_from_16_bytes_a_rank(size):
    """Each rank's messages, by the formulas that tests/comm/transport/test_traffic.py holds against the ledger."""
    for collective, chunk in product((*SUMS, "all_gather"), (SHORT, SHORT + 1, 1 << 12, 1 << 18, 1 << 22)):
        rows = chunk if collective == "all_gather" else chunk * size
        algorithm = choose(collective, size, chunk * size * FLOAT)
        for rank in {0, 1, size // 2, size - 1}:
            one = case(collective, algorithm, (rows,), torch.float32, segment_bytes=1 << 40)
            halves = 2 if collective == "all_reduce" else 1
            assert sum(messages(one, rank, size)) == halves * (size - 1) * chunk * FLOAT, algorithm


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", SIZES)
def test_the_ledger_counts_ring_bytes_if_no_algorithm_is_named(size):
    chunks = [SHORT, 1 << 10, (1 << 18) // size]

    def sent(world):
        counts = []
        for chunk in chunks:
            x = torch.zeros(chunk * world.size)
            for call in (world.all_reduce, world.all_reduce_, world.reduce_scatter):
                world.traffic.reset()
                call(x)
                counts.append(world.traffic.sent_bytes)
            world.traffic.reset()
            world.all_gather(x[:chunk])
            counts.append(world.traffic.sent_bytes)
        return counts

    shares = [(size - 1) * chunk * FLOAT for chunk in chunks]
    want = [halves * share for share in shares for halves in (2, 2, 1, 1)]
    assert minipar.run(sent, world_size=size) == [want] * size


def bits_of_both(world, lengths, op, seed, algorithm="auto") -> list[bool]:
    """Whether this rank's chunk of a reduce-scatter is that of the all-reduce, to the last bit."""
    world = world.using(algorithm)
    equal = []
    for n in lengths:
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed + world.rank))
        whole, own = world.all_reduce(x, op), world.reduce_scatter(x, op)
        equal.append(torch.equal(own, whole.split(chunk_sizes(n, world.size))[world.rank]))
    return equal


@given(st.sampled_from(SIZES), st.lists(st.integers(0, 4000), min_size=1, max_size=4), seeds)
@examples(20)
def test_a_reduce_scatter_adds_in_the_order_of_an_all_reduce(size, lengths, seed):
    for op in ("sum", "mean"):
        for equal in minipar.run(bits_of_both, lengths, op, seed, world_size=size):
            assert all(equal)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "hierarchical"])
@pytest.mark.parametrize("size", SIZES)
def test_so_do_both_by_an_algorithm_that_both_have(size, algorithm):
    for equal in minipar.run(bits_of_both, [5, 64, 3001], "sum", 0, algorithm, world_size=size):
        assert all(equal)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_both_change_to_another_order_at_the_same_length(size):
    edges = [collectives.LONG_BYTES, collectives.DOUBLING_BYTES, SHORT_BYTES_PER_RANK * size]
    lengths = [edge // FLOAT + more for edge in edges for more in (-1, 0)]
    for equal in minipar.run(bits_of_both, lengths, "mean", 0, world_size=size):
        assert all(equal)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_bits_do_tell_two_orders_of_addition_apart(size):
    """The checks above go red where the two take algorithms that add in different orders."""

    def equal(world):
        x = torch.randn(4000, generator=torch.Generator().manual_seed(world.rank))
        whole, own = world.all_reduce(x, algorithm="tree"), world.reduce_scatter(x, algorithm="ring")
        return torch.equal(own, whole.split(chunk_sizes(4000, world.size))[world.rank])

    assert not all(minipar.run(equal, world_size=size))


# What all ranks must agree on -----------------------------------------------------------------------------------


@given(st.integers(2, 8), st.sampled_from([0, 1, 15, 16, 70_000, 300_000]))
@examples(10)
def test_an_uneven_all_gather_is_chosen_by_the_bytes_of_the_result(size, rows):
    """Were the choice made by what a rank brings, ranks would choose different algorithms, and hang."""
    sizes = [rows if rank == 1 else 0 for rank in range(size)]

    def gathered(world):
        with mock.patch.object(collectives, "choose", return_value="ring") as chosen:
            y = world.all_gather(torch.full((sizes[world.rank], 3), float(world.rank)), sizes)
        return chosen.call_args.args, y.shape

    want = (("all_gather", size, rows * 3 * FLOAT), (rows, 3))
    assert minipar.run(gathered, world_size=size) == [want] * size


@examples(15)
@given(st.data())
def test_auto_gives_the_result_computed_in_one_process(data):
    size = data.draw(st.integers(1, 8))
    names = [(collective, "auto") for collective in ALGORITHMS]
    drawn = data.draw(st.lists(cases(size, names, max_rows=200), min_size=8, max_size=12))
    found = minipar.run(failures, drawn, world_size=size)
    assert not any(found)
