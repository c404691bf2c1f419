"""Deadlocks and lost messages, told from by_rank alone."""

import socket

from minipar.comm.transport.diagnosis import (
    MessageCounts,
    deadlock,
    last_waited_for,
    message_counts,
    unmatched_messages,
)
from minipar.comm.transport.messages import Message, OnLink

CHANNEL = "comm 'world'"


def counts(waiting=(), sent=None, received=None) -> MessageCounts:
    """`sent` and `received`: peer -> (how many, bytes of the last)."""
    tables = [
        {(CHANNEL, "p2p", peer): (*posted, "") for peer, posted in (table or {}).items()}
        for table in (sent, received)
    ]
    return MessageCounts(list(waiting), *tables)


def message(verb, peer, number=0, num_bytes=8):
    return Message(verb, peer, CHANNEL, "p2p", number, num_bytes)


def test_a_message_says_what_it_is():
    assert str(message("send", 3, 2)) == "send 8 bytes to rank 3 on comm 'world' (message 2)"
    assert str(message("receive", 1)) == "receive 8 bytes from rank 1 on comm 'world' (message 0)"


def test_nothing_is_surplus_where_all_was_received():
    assert unmatched_messages({0: counts(sent={1: (3, 8)}), 1: counts(received={0: (3, 8)})}) == []


def test_a_surplus_names_the_pair_and_how_many():
    by_rank = {0: counts(sent={1: (3, 8)}), 1: counts(received={0: (1, 8)}, sent={0: (0, 0)})}
    assert unmatched_messages(by_rank) == [
        (0, f"rank 0 sent 2 messages to rank 1 on {CHANNEL} that were not received")
    ]
    by_rank = {0: counts(), 1: counts(received={0: (1, 8)})}
    assert unmatched_messages(by_rank) == [
        (1, f"rank 1 asked rank 0 for 1 message on {CHANNEL} that was not sent")
    ]


def test_lanes_count_apart():
    sent = MessageCounts([], {(CHANNEL, "collective", 1): (1, 8, "")}, {})
    assert len(unmatched_messages({0: sent, 1: counts(received={0: (1, 8)})})) == 2


def receiving_from(peer, sent=None):
    return counts([message("receive", peer)], sent=sent, received={peer: (1, 8)})


def test_ranks_that_receive_from_each_other_first_are_deadlocked():
    why = deadlock({0: receiving_from(1), 1: receiving_from(0)}, {0, 1}, set())
    waits = "rank {0} waits to receive 8 bytes from rank {1} on comm 'world' (message 0), but rank {1} is blocked itself"
    assert why == {0: waits.format(0, 1), 1: waits.format(1, 0)}


def test_there_is_no_deadlock_while_one_rank_is_at_work():
    assert deadlock({0: receiving_from(1), 1: counts()}, {0}, set()) is None


def test_there_is_no_deadlock_while_nobody_is_blocked():
    assert deadlock({0: counts(), 1: counts()}, set(), {0, 1}) is None


def test_there_is_no_deadlock_while_a_message_is_under_way():
    """Rank 1 has posted what rank 0 waits for, so rank 0 may yet go on, and then free rank 1."""
    assert deadlock({0: receiving_from(1), 1: receiving_from(0, sent={0: (1, 8)})}, {0, 1}, set()) is None


def test_waiting_for_a_rank_that_has_returned_is_hopeless():
    why = deadlock({0: receiving_from(1), 1: counts()}, {0}, {1})
    assert why[0].endswith("from rank 1 on comm 'world' (message 0), but rank 1's function has returned")


def test_halves_of_different_lengths_never_meet():
    sends = counts([message("send", 1, num_bytes=4)], sent={1: (1, 4)})
    why = deadlock({0: sends, 1: receiving_from(0)}, {0, 1}, set())
    assert why[0].endswith("but rank 1 expects 8 bytes")
    assert why[1].endswith("but rank 0 sends 4 bytes")


def waiting_on_a_link(peer, there=False, sent=None):
    """Receives from `peer` a message on a link, of which a part may be there."""
    on_link = message("receive", peer)._replace(needs_peer=not there)
    return counts([on_link], sent=sent, received={peer: (1, 8)})


def test_waiting_on_a_link_for_a_blocked_rank_is_a_deadlock():
    """Rank 0 has returned; 1 waits for it, 2 for 1, and 3 for 2, whose messages are posted."""
    by_rank = {
        0: counts(),
        1: receiving_from(0, sent={2: (1, 8)}),
        2: waiting_on_a_link(1, sent={3: (1, 8)}),
        3: waiting_on_a_link(2),
    }
    why = deadlock(by_rank, {1, 2, 3}, {0})
    assert why.keys() == {1, 2, 3}
    assert why[1].endswith("but rank 0's function has returned")
    assert why[3].endswith("but rank 2 is blocked itself")
    assert deadlock(by_rank | {3: waiting_on_a_link(2, there=True)}, {1, 2, 3}, {0}) is None
    through_gloo = counts([message("receive", 1)], sent={3: (1, 8)}, received={1: (1, 8)})
    assert deadlock(by_rank | {2: through_gloo}, {1, 2, 3}, {0}) is None


def test_a_wait_on_a_link_tells_whether_something_is_there():
    here, there = socket.socketpair()
    with here, there:
        wait = OnLink(message("receive", 1), here)
        assert message_counts({7: wait}, []).waiting == [message("receive", 1)._replace(needs_peer=True)]
        there.send(b"m")
        assert message_counts({7: wait}, []).waiting == [message("receive", 1)]
    assert wait.as_message() == message("receive", 1)  # closed since


def test_a_rank_not_blocked_by_a_message_is_not_judged():
    assert deadlock({0: counts(), 1: receiving_from(0)}, {0, 1}, set()) is None


def test_the_wait_for_a_wait_for_a_rank_leads_to_that_rank():
    assert last_waited_for(0, {0: 3, 3: 1, 1: 2}) == 2
    assert last_waited_for(0, {}) == 0


def test_a_circle_of_waits_leads_nowhere():
    assert last_waited_for(0, {0: 1, 1: 2, 2: 1}) == 0


def test_a_message_of_another_operation_or_dtype_is_told_from_its_own():
    mine = MessageCounts([message("send", 1)._replace(label="all_reduce sum float32")], {}, {})
    theirs = MessageCounts(
        [message("receive", 0)._replace(label="all_gather float32")],
        {},
        {(CHANNEL, "p2p", 0): (1, 8, "all_gather float32")},
    )
    why = deadlock({0: mine, 1: theirs}, {0, 1}, set())
    assert "(all_reduce sum float32, message 0), but rank 1 expects 8 bytes of all_gather" in why[0]
