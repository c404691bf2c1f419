"""The NCCL transport: an exchange is one group call of a send and a receive, matched by order alone, on a CUDA stream.

Each Comm has its own process group, so all ranks must make their Comms in the same order; `Mesh` does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from minipar.comm.cuda_stream import CudaStream
from minipar.comm.messages import Channel, Traffic
from minipar.comm.transport import PendingMessages, Transport


class Grouped(Transport):
    """Transport that posts messages through NCCL on the current CUDA stream. An empty tensor is not sent."""

    def make_stream(self, name: str) -> CudaStream:
        return CudaStream(name, self.device)

    def prepare_channel(self, channel: Channel) -> None:
        if len(channel.peers) > 1:
            self.process_group(channel.key)

    def post(self, channel: Channel, kind: str, x, to, out, source, traffic: Traffic) -> PendingMessages:
        group, ops, ranks = self.process_group(channel.key), [], channel.key.ranks
        if source is not None and out.numel():
            ops.append(dist.P2POp(dist.irecv, out, ranks[source], group))
        if to is not None and x.numel():
            x = x.detach().contiguous()
            x.record_stream(torch.cuda.current_stream())  # another stream may free it while this one sends it
            ops.append(dist.P2POp(dist.isend, x, ranks[to], group))
            traffic.book(channel.kind or kind, x.nbytes)
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return PendingMessages(self, (), out)
