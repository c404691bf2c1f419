"""The grouped transport, for NCCL: a communicator per Comm, and messages matched by order alone, on a CUDA stream.

A message has no tag. An exchange is one group call of a send and a receive, so that neither waits for the other's turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm.transport.cuda_stream import CudaStream
from minipar.comm.transport.messages import Channel, ChannelId, Half
from minipar.comm.transport.process_groups import named_group
from minipar.comm.transport.stream import Stream
from minipar.comm.transport.transport import Posted, Transport


class Grouped(Transport):
    """Transport that posts messages through NCCL on the current CUDA stream.

    The communicators of a pool outlive a run. In a run, the nth channel of a set of ranks gets these ranks' nth
    communicator, on every rank, because all of them make their channels in the same order.
    """

    posts_ahead = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._communicators: dict[ChannelId, Any] = {}
        self._num_communicators: Counter[tuple[int, ...]] = Counter()

    def process_group(self, key: ChannelId) -> Any:
        """Return the communicator of these ranks, in this order. No other channel uses it, not even the world's."""
        if key not in self._communicators:
            of = ChannelId(f"communicator {self._num_communicators[key.ranks]}", key.ranks)
            if of not in self.groups:
                self.groups[of] = named_group(
                    list(key.ranks), self.namespace + of.name, self.timeout_s, self.device
                )
            self._num_communicators[key.ranks] += 1
            self._communicators[key] = self.groups[of]
        return self._communicators[key]

    def release_groups(self) -> None:
        super().release_groups()
        self._communicators.clear()

    def make_stream(self, key: ChannelId) -> Stream:
        return CudaStream(key, self.device, self.watch)

    def prepare(self, channel: Channel) -> None:
        """Make the communicator. In a group of two, the ranks also exchange a message in both directions.

        NCCL connects a pair of ranks at their first message, for which each host waits for the other. Two ranks of a
        pipeline reach that message at different times, so they connect here. In a larger group the first message is a step
        of a collective, which all ranks have entered.
        """
        ranks = channel.key.ranks
        if len(ranks) > 1:
            group = self.process_group(channel.key)
            if len(ranks) == 2:
                other = ranks[1 - ranks.index(self.rank)]
                token = torch.zeros(1, device=self.device)
                _in_one_group(group, (torch.empty_like(token), other), (token, other))

    def start(
        self, channel: Channel, send: Half | None, receive: Half | None, paired: bool
    ) -> Sequence[Posted]:
        ranks = channel.key.ranks
        received = sent = None
        if receive:
            out, source = receive
            self.note(channel, "receive", out.nbytes, source, channel.label(out.dtype)[0])
            received = (out, ranks[source])
        if send:
            x, to = send
            self.note(channel, "send", x.nbytes, to, channel.label(x.dtype)[0])
            # Otherwise the memory of x could be reused during the send.
            x.record_stream(torch.cuda.current_stream())
            sent = (x, ranks[to])
        if received or sent:
            _in_one_group(self.process_group(channel.key), received, sent)
        return ()


# A tensor and a world rank.
OfRank = tuple[torch.Tensor, int]


def _in_one_group(group: Any, receive: OfRank | None, send: OfRank | None) -> None:
    """Post a receive and a send as one group call. The current stream waits for them."""
    ops = [dist.P2POp(op, *of, group) for op, of in ((dist.irecv, receive), (dist.isend, send)) if of]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
