"""The same ranks with tensors on the CPU: for values that the host reads anyway, such as checkpoints' digests."""

from __future__ import annotations

import torch

from minipar.comm.communicator import Comm
from minipar.comm.native import has_backend
from minipar.comm.transport import Tagged


def on_host(comm: Comm) -> Comm:
    """Return a Comm of the same ranks for tensors on the CPU: `comm` itself where that is its device.

    On GPUs it sends through gloo, by the CPU's side of the same process group, with deadlines and counts as on a machine
    without GPUs; so a value that the host needs is not copied to a GPU and waited for there. Where the process group has
    no gloo (a caller's own, of NCCL alone), `comm` itself.
    """
    if comm.device.type == "cpu":
        return comm
    transport = comm._transport
    if not has_backend(transport.group, "gloo"):
        return comm
    host = Tagged(
        transport.group, transport.ranks, transport.rank, torch.device("cpu"), transport.timeout_s,
        run=transport.run, node_size=transport.node_size, report=transport.report,
    )  # fmt: skip
    # Shared, so that whoever explains a hang or a lost message sees these messages too.
    host.channels, host.waits = transport.channels, transport.waits
    return Comm(host, comm.ranks, f"{comm.name} on the host", parent=comm)
