"""A rank whose GPU waits in vain is explained by the rank that has not called the operation. No GPU is needed."""

from types import SimpleNamespace

import pytest

from minipar.comm.transport.diagnosis import MessageCounts
from minipar.comm.transport.messages import ChannelId
from minipar.comm.transport.watch import Stuck
from minipar.runtime.call import Call
from minipar.runtime.protocol import Status
from minipar.runtime.worker import _stuck
from minipar.support.errors import RankError

WORLD = ChannelId("world", (0, 1, 2))
STUCK = Stuck("all_reduce", WORLD, 3, 20.0)


def status(operations, where="running (train.py:7)"):
    return Status(False, where, MessageCounts([], {}, {}), operations={WORLD: operations})


def call(statuses, answers=()):
    """A call in which rank 0 has said that its all_reduce does not end."""
    made = Call(None, [SimpleNamespace(rank=r) for r in range(3)], "done")
    made._failures[0] = _stuck(0, STUCK)
    made._statuses.update(statuses)
    made._answers.update(dict.fromkeys(answers, None))
    return made


def test_the_operation_and_the_rank_that_is_missing_are_named():
    with pytest.raises(RankError, match="rank 1 is late") as failed:
        call({1: status(3), 2: status(4)})._name_who_is_behind(0, STUCK)
    assert failed.value.rank == 1
    for words in (
        "rank 0 waits: all_reduce on comm 'world' (operation 3) has not ended after 20 s",
        "train.py:7",
    ):
        assert words in str(failed.value)


def test_a_rank_that_has_returned_without_it_is_named():
    with pytest.raises(RankError, match="rank 2 has not called; it is done: its function has returned"):
        call({1: status(4)}, answers=[2])._name_who_is_behind(0, STUCK)


def test_nobody_is_accused_where_all_have_called_it():
    call({1: status(4), 2: status(5)})._name_who_is_behind(0, STUCK)


def test_a_stuck_operation_is_a_failure_that_says_so():
    failure = _stuck(0, STUCK)
    assert failure.timed_out
    assert failure.traceback == "rank 0: all_reduce on comm 'world' (operation 3) has not ended after 20 s"
