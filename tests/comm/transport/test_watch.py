"""A GPU's operation that does not end is noticed in time, and the rank that has not called it is named."""

import threading

import pytest
import torch

from minipar.comm.transport.messages import ChannelId
from minipar.comm.transport.watch import Stuck, Watch, ranks_behind

WORLD, LINE = ChannelId("world", (0, 1, 2)), ChannelId("world/line", (1, 2))


class Clock:
    """Time, and events that happen when the test says so."""

    def __init__(self, timeout_s=10.0):
        self.now_s, self.found = 0.0, []
        self.watch = Watch(timeout_s, self.found.append, lambda: self.now_s)

    def add(self, what, channel=WORLD):
        begin, end = Happens(), Happens()
        self.watch.add(what, channel, begin, end)
        return begin, end

    def look_at(self, now_s):
        self.now_s = now_s
        return self.watch.look()


class Happens:
    happened = False

    def query(self):
        return self.happened


def test_time_counts_from_when_the_operation_begins_on_the_gpu():
    clock = Clock()
    begin, end = clock.add("all_reduce")
    assert clock.look_at(100) is None  # this rank's own work comes first
    begin.happened = True
    assert clock.look_at(101) is None
    assert clock.look_at(111) is None
    assert clock.look_at(111.1) == Stuck("all_reduce", WORLD, 0, 10.0)
    end.happened = True
    assert clock.look_at(1000) is None


def test_an_operation_is_only_judged_once_the_one_before_it_has_ended():
    clock = Clock()
    (first, first_end), (second, _) = clock.add("all_gather"), clock.add("all_reduce")
    first.happened = first_end.happened = second.happened = True
    assert clock.look_at(0) is None
    assert clock.look_at(11) == Stuck("all_reduce", WORLD, 1, 10.0)


def test_each_stream_is_watched_alone():
    clock = Clock()
    clock.add("all_reduce")
    begin, _ = clock.add("send", LINE)
    begin.happened = True
    clock.look_at(0)
    assert clock.look_at(11).channel == LINE


def test_what_is_stuck_is_said_in_words():
    assert str(Stuck("all_reduce", WORLD, 3, 10.0)) == (
        "all_reduce on comm 'world' (operation 3) has not ended after 10 s"
    )


@pytest.mark.parametrize(
    ("counts", "behind"),
    [
        ({0: {WORLD: 4}, 1: {WORLD: 4}, 2: {WORLD: 3}}, [2]),
        ({0: {WORLD: 4}, 1: {}, 2: {WORLD: 3}}, [1, 2]),
        ({0: {WORLD: 4}, 1: {WORLD: 5}, 2: {WORLD: 4}}, []),  # all have called it: not a rank's omission
        ({0: {WORLD: 4}, 1: {WORLD: 4}}, []),  # nobody has asked rank 2
        ({0: {WORLD: 4}, 1: {WORLD: 4}, 2: {WORLD: 4}, 3: {}}, []),  # rank 3 is no member
    ],
)
def test_the_ranks_that_have_not_called_it_are_found_by_their_counts(counts, behind):
    assert ranks_behind(Stuck("all_reduce", WORLD, 3, 10.0), counts) == behind


def test_a_rank_that_has_called_nothing_is_behind_the_first_operation():
    assert ranks_behind(Stuck("all_reduce", WORLD, 0, 10.0), {0: {WORLD: 1}, 1: {}}) == [1]


def test_the_thread_calls_once_and_ends():
    called, by = threading.Event(), []
    watch = Watch(0.0, lambda stuck: by.append(threading.current_thread().name) or called.set())
    begin, _ = Happens(), Happens()
    begin.happened = True
    watch.add("all_reduce", WORLD, begin, Happens())
    watch.start(torch.device("cpu"), every_s=0.001)
    assert called.wait(30)
    watch.stop()
    assert by == ["watch"]
