"""Two records are alike only if every step is of the same kind, too."""

import pytest

from minipar.comm.transport.messages import ChannelId, Message
from minipar.extras.dry_run.record import Finished, Make, Post, Program, Recorded, Start, difference

WORLD = ChannelId("world", (0, 1))
SEND = Message("send", 1, WORLD, "p2p", 0, 16, "float32")
STEPS = [Make(WORLD), Post(0, SEND, None), Start(0), Finished(0)]


def program(steps=STEPS, operations=(), ended=True):
    return Program(0, list(steps), list(operations), 1, ended)


def called(shape):
    return Recorded(WORLD, [], "all_reduce sum", shape)


def test_equal_records_do_not_differ():
    assert difference(program(), program()) == ""
    gathers = [Recorded(WORLD, [], "all_gather", shape) for shape in ((2,), (3,))]
    assert difference(program(operations=gathers[:1]), program(operations=gathers[1:])) == ""


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (program(), program(STEPS[:3]), "step 4 is to wait on one and to do nothing on the other"),
        (program(STEPS[:3]), program([*STEPS[:2], Finished(0)]), "step 3 is to go on on one and to wait on the"),
        (program(STEPS[:1]), program(STEPS[1:2]), "step 1 is to make comm 'world' on one and to send 16 bytes to rank 1"),
        (program(operations=[called((8,))]), program(operations=[called((9,))]),
         "operation 1 is all_reduce sum of [8] on comm 'world' on one and all_reduce sum of [9]"),
        (program(operations=[called((8,))]), program(), "operation 1 is all_reduce sum of [8] on comm 'world' on one"),
        (program(), program(ended=False), "one ended and the other did not"),
    ],
)  # fmt: skip
def test_a_difference_is_named(first, other, words):
    assert difference(first, other).startswith(words)
