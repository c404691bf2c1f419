"""A Comm of the same ranks for CPU tensors, for values that the host reads anyway, such as checkpoints' digests."""

from __future__ import annotations

import torch

from minipar.comm.communicator import Comm
from minipar.comm.transport.process_groups import has_backend
from minipar.comm.transport.transport import Tagged


def on_host(comm: Comm) -> Comm:
    """Return a Comm of the same ranks for tensors on the CPU; if `comm` is for the CPU, `comm` itself.

    On GPUs that Comm sends through the gloo backend of the same process group, with deadlines and counts as on a machine
    without GPUs. A value that the host needs then makes no detour over a GPU. If the process group has no gloo (a
    caller's own group with only NCCL), `comm` itself is returned.
    """
    if comm.device.type == "cpu":
        return comm
    of = comm._transport
    if not has_backend(of.group, "gloo"):
        return comm
    host = Tagged(
        of.group, of.ranks, of.rank, torch.device("cpu"), of.timeout_s,
        run=of.run, node_size=of.node_size, report=of.report, ask=of.ask,
    )  # fmt: skip
    # Shared, so that the explanation of a hang or a lost message includes these messages.
    host.channels = of.channels
    host.waits = of.waits
    host.groups = (
        of.groups
    )  # torch makes a group of a name once; the same comm may be asked for its host's twice
    return Comm(host, comm.ranks, f"{comm.name} on the host", parent=comm)
