"""The grouped transport, for NCCL: a communicator per Comm, and messages matched by order alone, on a CUDA stream.

A message has no tag. An exchange is one group call of a send and a receive, so that neither waits for the other's turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm.cuda_stream import CudaStream
from minipar.comm.messages import Channel, ChannelId
from minipar.comm.native import named_group
from minipar.comm.transport import Transport


class Grouped(Transport):
    """Transport that posts messages through NCCL on the current CUDA stream.

    The communicators of a pool outlive a run: the nth channel of some ranks in a run gets the nth communicator of these
    ranks, on all of them, as they make their channels in one order.
    """

    posts_ahead = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._communicators: dict[ChannelId, Any] = {}
        self._num_communicators: Counter[tuple[int, ...]] = Counter()

    def process_group(self, key: ChannelId):
        """Return the communicator of these ranks, in this order: no other channel has it, the world's neither."""
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

    def make_stream(self, key: ChannelId):
        return CudaStream(key, self.device, self.watch)

    def prepare(self, channel: Channel) -> None:
        """Make the communicator. Two ranks also exchange a message, in both directions.

        NCCL connects a pair of ranks at its first message, and the host of each waits for the other there. In a group of
        two that may be anywhere, as in a pipeline; in a larger one it is a step of a collective, which all are in.
        """
        ranks = channel.key.ranks
        if len(ranks) > 1:
            group = self.process_group(channel.key)
            if len(ranks) == 2:
                other, token = ranks[1 - ranks.index(self.rank)], torch.zeros(1, device=self.device)
                _in_one_group(group, (torch.empty_like(token), other), (token, other))

    def start(self, channel: Channel, x, to, out, source) -> Sequence[tuple]:
        ranks = channel.key.ranks
        receive = send = None
        if out is not None:
            self.note(channel, "receive", out.nbytes, source, channel.label(out.dtype)[0])
            receive = (out, ranks[source])
        if x is not None:
            self.note(channel, "send", x.nbytes, to, channel.label(x.dtype)[0])
            x.record_stream(torch.cuda.current_stream())  # another stream may free it while this one sends it
            send = (x, ranks[to])
        if receive or send:
            _in_one_group(self.process_group(channel.key), receive, send)
        return ()


def _in_one_group(group, receive: tuple | None, send: tuple | None) -> None:
    """Post a receive and a send, (tensor, rank) each, as one group call. The current stream waits for them."""
    ops = [dist.P2POp(op, *of, group) for op, of in ((dist.irecv, receive), (dist.isend, send)) if of]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
