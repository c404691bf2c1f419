"""Bruck's all-to-all: the same result as pairwise, in log p messages, and the bytes that this costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import pairwise
from minipar.comm.collectives import choose
from minipar.extras.collectives import bruck
from minipar.spec.collectives import Call, wrong
from tests.comm.cases import cases, failures
from tests.comm.test_faults import Tampered
from tests.examples import examples


@examples(10)
@given(st.data())
def test_it_gives_the_result_computed_in_one_process(data):
    size = data.draw(st.integers(1, 8))
    drawn = data.draw(st.lists(cases(size, [("all_to_all", "bruck")]), min_size=6, max_size=10))
    found = minipar.run(failures, drawn, world_size=size)
    assert not any(found), found


@given(st.integers(1, 8), st.integers(0, 30), st.sampled_from([(), (3,), (0,)]))
@examples(15)
def test_without_sizes_no_lengths_are_sent_and_each_block_once_for_each_bit_of_its_distance(size, rows, rest):
    def both(world):
        x = torch.arange(rows * torch.Size(rest).numel()).view(rows, *rest) + 1000 * world.rank
        want = pairwise.all_to_all(world, x)
        world.traffic.reset()
        got = world.all_to_all(x, algorithm="bruck")
        return torch.equal(got, want), world.traffic.sent_bytes, world.traffic.messages

    found = minipar.run(both, world_size=size)
    assert all(equal for equal, *_ in found)
    if rows % size == 0:
        chunk = rows // size * torch.Size(rest).numel() * 8
        steps = (size - 1).bit_length() if chunk else 0
        want = chunk * sum(i.bit_count() for i in range(size))
        assert [told for _, *told in found] == [[want, steps]] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_half_of_the_vector_is_sent_in_each_of_log_p_messages(size):
    def sent(world):
        world.all_to_all(torch.zeros(3 * size), algorithm="bruck")
        return world.traffic.sent_bytes, world.traffic.messages

    steps = size.bit_length() - 1
    assert minipar.run(sent, world_size=size) == [(steps * 3 * size * 4 // 2, steps)] * size


@given(st.integers(1, 100), st.integers(0, 1 << 28))
def test_auto_does_not_choose_it(p, num_bytes):
    assert choose("all_to_all", p, num_bytes) == "pairwise"


class BlocksStay(Tampered):
    """The blocks of the last round do not move."""

    def exchange(self, x, to, shape, dtype, source):
        received = self._comm.exchange(x, to, shape, dtype, source)
        return x if dtype.is_floating_point and (to - self.rank) % self.size == 4 else received


def test_a_round_left_out_is_noticed():
    def check(world):
        call = Call("all_to_all", (16, 2))
        broken = wrong(world, lambda comm, x, *sizes: bruck.all_to_all(BlocksStay(comm), x, *sizes), call)
        return broken is not None, wrong(world, bruck.all_to_all, call)

    assert minipar.run(check, world_size=8) == [(True, None)] * 8
