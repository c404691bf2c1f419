"""The time of recorded programs is that of the alpha-beta model, and a program that waits for ever is refused."""

from functools import partial
from math import log2

import pytest
import torch

from minipar.comm.transport.messages import ChannelId, Message
from minipar.extras.dry_run import run_ranks
from minipar.extras.dry_run.links import seconds_on_links
from minipar.extras.dry_run.record import Completed, Post, Program

ALPHA, BETA = 5e-6, 1 / 25e9


def seconds(program, size):
    return seconds_on_links(run_ranks(size, lambda world, _: program(world)).programs, ALPHA, BETA)


def all_reduce(name, num_bytes, world):
    world.all_reduce(torch.ones(num_bytes // 4), algorithm=name)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 20])
def test_an_all_reduce_takes_its_steps_plus_its_serial_bytes(size, num_bytes):
    log, share = log2(size), 2 * (size - 1) / size
    expected = {
        "ring": (2 * (size - 1), share),
        "tree": (2 * log, 2 * log),
        "halving_doubling": (2 * log, share),
        "doubling": (log, log),
    }
    for name, (steps, vectors) in expected.items():
        took_s = seconds(partial(all_reduce, name, num_bytes), size)
        assert took_s == pytest.approx(steps * ALPHA + vectors * num_bytes * BETA, rel=1e-12), name


def test_messages_of_one_rank_share_its_link_and_those_of_two_do_not():
    def in_a_ring(world):
        x = torch.ones(100)
        world.exchange(x, (world.rank + 1) % 3, x.shape, x.dtype, (world.rank - 1) % 3)

    one = ALPHA + 400 * BETA
    assert seconds(in_a_ring, 3) == pytest.approx(one)
    channel = ChannelId("world", (0, 1, 2))
    sends = [Post(i, Message("send", to, channel, "p2p", 0, 400), None) for i, to in enumerate((1, 2))]
    receive = Post(0, None, Message("receive", 0, channel, "p2p", 0, 400))
    programs = [Program(0, [*sends, Completed(0), Completed(1)])]
    programs += [Program(rank, [receive, Completed(0)]) for rank in (1, 2)]
    assert seconds_on_links(programs, ALPHA, BETA) == pytest.approx(2 * one)


def test_programs_that_send_nothing_take_no_time():
    assert seconds(lambda world: None, 2) == 0


def test_programs_that_wait_for_each_other_are_refused():
    def receive_first(world):
        x = world.recv((1,), torch.float32, 1 - world.rank)
        world.send(x, 1 - world.rank)

    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for messages that no rank sends"):
        seconds(receive_first, 2)
