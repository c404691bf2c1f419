"""When NCCL's transport makes a communicator, and which ranks it connects; NCCL itself runs in tests/gpu."""

from unittest import mock

import pytest
import torch

from minipar.comm.transport import grouped
from minipar.comm.transport.messages import ChannelId


@pytest.mark.parametrize(
    ("ranks", "made", "connected"),
    [((3,), 0, []), ((5, 3), 1, [(5, 5)]), ((3, 5), 1, [(5, 5)]), ((1, 3, 5), 1, [])],
)
def test_groups_get_communicators_at_once_and_pairs_connect(monkeypatch, ranks, made, connected):
    peers = []
    monkeypatch.setattr(
        grouped, "_in_one_group", lambda _, receive, send: peers.append((receive[1], send[1]))
    )
    transport = mock.Mock(rank=3, device=torch.device("cpu"))
    grouped.Grouped.prepare(transport, mock.Mock(key=ChannelId("group", ranks)))
    assert transport.process_group.call_count == made
    assert peers == connected
