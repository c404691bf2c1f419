"""torch's own collectives on the ranks of a Comm, as the baseline of the hand-written ones; and named process groups.

Only this file, `existing_group.py`, the transports and `runtime/` use torch.distributed.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from minipar.chunks import check_sizes
from minipar.comm.pairwise import all_to_all_sizes
from minipar.comm.reduction import find_reduction
from minipar.comm.ring import gathered_sizes

# the new names since torch 2.13, which warns of the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def native(comm, collective: str, x: torch.Tensor, **kwargs):
    """Run torch's collective of this name. Traffic counts the bytes of x once, under the kind "native"."""
    comm.traffic.book("native", x.nbytes)
    comm._transport.before_native(comm._channel, x)
    x, group = x.detach().contiguous(), comm.process_group()
    set_timeout([group], comm.timeout_s, comm.device)
    return NATIVE[collective](comm, group, x, **kwargs)


def set_timeout(groups, timeout_s: float, device: torch.device) -> None:
    """Set what an operation on these process groups may take. torch's collectives take no timeout of their own.

    On a GPU it is twice `timeout_s`: NCCL's own watchdog ends the process, so that the Watch, which can explain, is first.
    """
    limit = timedelta(seconds=timeout_s if device.type == "cpu" else 2 * timeout_s)
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(limit, group)


def _all_reduce(comm, group, x, op, out=None):
    out = x.clone() if out is None else out.copy_(x)
    dist.all_reduce(out, _native_op(op, x), group)
    return out.div_(comm.size) if op == "mean" else out


def _reduce(comm, group, x, root, op):
    out = x.clone()
    dist.reduce(out, comm.ranks[root], _native_op(op, x), group)
    return None if comm.rank != root else out.div_(comm.size) if op == "mean" else out


def _broadcast(comm, group, x, root):
    out = x.clone()
    dist.broadcast(out, comm.ranks[root], group)
    return out


def _reduce_scatter(comm, group, x, op, sizes, out=None):
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    padded = torch.cat([_pad(chunk, max(sizes)) for chunk in x.split(sizes)])  # torch takes equal chunks only
    padded_own = x.new_empty((max(sizes), *x.shape[1:]))
    reduce_scatter_single(padded_own, padded, _native_op(op, x), group)
    own = padded_own[: sizes[comm.rank]]
    own = own.clone() if out is None else out.copy_(own)
    return own.div_(comm.size) if op == "mean" else own


def _all_gather(comm, group, x, sizes, out=None):
    sizes = gathered_sizes(comm, x, sizes)
    padded = x.new_empty((comm.size * max(sizes), *x.shape[1:]))
    all_gather_single(padded, _pad(x, max(sizes)), group)
    chunks = [c[:n] for c, n in zip(padded.chunk(comm.size), sizes)]
    if out is not None:
        return torch.cat(chunks, out=out)
    return padded if min(sizes) == max(sizes) else torch.cat(chunks)


def _all_to_all(comm, group, x, send_sizes, recv_sizes):
    send_sizes, recv_sizes = all_to_all_sizes(comm, x, send_sizes, recv_sizes)
    out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
    dist.all_to_all_single(out, x, recv_sizes, send_sizes, group)
    return out


NATIVE = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _native_op(op: str, x: torch.Tensor):
    return getattr(dist.ReduceOp, find_reduction(op, x.dtype).torch_name)


def _pad(x: torch.Tensor, length: int) -> torch.Tensor:
    """x with dim 0 lengthened to `length`; the padding is never read."""
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros((length - x.shape[0], *x.shape[1:]))])


def has_backend(group, name: str) -> bool:
    """Return whether a process group has this backend, for any device: "cpu:gloo,cuda:nccl" has two."""
    return name in dist.get_backend(group)


def named_group(
    ranks: list[int], name: str, timeout_s: float, device: torch.device | None = None
) -> dist.ProcessGroup:
    """Create a process group whose members find each other by its name.

    dist.new_group instead matches members by the number of groups each process has created so far. It hangs where these
    numbers differ, as in a pool that serves worlds of several sizes.
    On a GPU NCCL connects the members here, and not by ncclCommSplit, which all ranks of the world would have to call.
    """
    c10d = dist.distributed_c10d
    on_gpu = device is not None and device.type == "cuda"
    world = c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            "nccl" if on_gpu else dist.get_backend(),
            c10d._get_default_store(),
            group_name=f"{name} {ranks}",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
