"""The two trees of an all-reduce: nobody works twice, both reach everybody, and what they send adds up."""

from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import reduction
from minipar.comm.collectives import choose
from minipar.extras.collectives import double_tree
from minipar.extras.collectives.double_tree import two_trees
from minipar.spec.collectives import Call, wrong
from tests.comm.cases import cases, failures
from tests.comm.test_faults import Tampered
from tests.examples import examples

sizes = st.integers(1, 8)


def depth(trees, rank: int) -> int:
    """Messages from the root; more than there are ranks where the way up does not end."""
    steps = 0
    while trees[rank].parent is not None and steps <= len(trees):
        rank, steps = trees[rank].parent, steps + 1
    return steps


@given(st.integers(1, 300))
def test_trees_span_the_ranks_and_share_no_inner_node(p):
    both = [two_trees(rank, p) for rank in range(p)]
    for trees in zip(*both):
        below = sorted((child, rank) for rank in range(p) for child in trees[rank].children)
        above = sorted((rank, trees[rank].parent) for rank in range(p) if trees[rank].parent is not None)
        assert below == above
        assert len(above) == p - 1
        assert all(len(node.children) <= 2 for node in trees)
        assert max(depth(trees, rank) for rank in range(p)) == p.bit_length() - 1
    for rank, (first, second) in enumerate(both):
        assert not (first.children and second.children)
        assert bool(first.children) <= (rank % 2 == 1)
        assert bool(second.children) <= (rank % 2 == 0)
    if p > 1:
        leaves_in_both = [rank for rank, (a, b) in enumerate(both) if not (a.children or b.children)]
        assert leaves_in_both == ([p - 1] if p % 2 else [])


@examples(10)
@given(st.data())
def test_it_gives_the_result_computed_in_one_process(data):
    size = data.draw(sizes)
    drawn = data.draw(st.lists(cases(size, [("all_reduce", "double_tree")]), min_size=6, max_size=10))
    found = minipar.run(failures, drawn, world_size=size)
    assert not any(found), found


@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_ranks_send_a_rings_total_and_each_at_most_two_vectors(size):
    n = 1001

    def sent(world):
        with mock.patch.object(reduction, "SEGMENT_BYTES", 64):
            world.all_reduce(torch.zeros(n), algorithm="double_tree")
        return world.traffic.sent_bytes

    bytes_of = minipar.run(sent, world_size=size)
    assert sum(bytes_of) == 2 * (size - 1) * 4 * n
    assert max(bytes_of) <= 2 * 4 * (n + 1)


@given(st.integers(1, 100), st.integers(0, 1 << 28))
def test_auto_does_not_choose_it(p, num_bytes):
    assert choose("all_reduce", p, num_bytes) != "double_tree"


class Arrived(NamedTuple):
    out: torch.Tensor

    def wait(self):
        return self.out


class Forgetful(Tampered):
    """Every third thing that arrives is replaced by zeros."""

    def exchange(self, x, to, shape, dtype, source, out, async_op=False):
        out = self._comm.exchange(x, to, shape, dtype, source, out=out)
        self.num_exchanges += 1
        if self.num_exchanges % 3 == 0:
            out.zero_()
        return Arrived(out) if async_op else out


class Backwards(Tampered):
    """Every second message is sent back to front."""

    def send(self, x, to, async_op=False):
        self.num_exchanges += 1
        x = x.flip(0) if self.num_exchanges % 2 else x
        return self._comm.send(x.contiguous(), to, async_op=async_op)


@pytest.mark.parametrize("fault", [Forgetful, Backwards, None])
def test_trees_whose_messages_go_wrong_are_noticed(fault):
    def check(world):
        broken = (lambda comm, x: double_tree.all_reduce(fault(comm), x)) if fault else double_tree.all_reduce
        return wrong(world, broken, Call("all_reduce", (10, 2)))

    assert any(minipar.run(check, world_size=5)) == (fault is not None)


def test_one_tree_used_twice_is_noticed():
    """The sum stays right; a rank that is an inner node for both halves sends more than twice the vector."""

    def sent(world):
        first = two_trees(world.rank, world.size)[0]
        with mock.patch.object(double_tree, "two_trees", return_value=(first, first)):
            total = double_tree.all_reduce(world, torch.ones(1000))
        return total.unique().tolist(), world.traffic.sent_bytes

    found = minipar.run(sent, world_size=8)
    assert all(total == [8.0] for total, _ in found)
    assert max(num_bytes for _, num_bytes in found) > 2 * 4 * 1000
