"""torch's own collectives on the ranks of a Comm: the baseline for the hand-written ones."""

from __future__ import annotations

from typing import Any

import torch

from minipar.comm.pairwise import all_to_all_sizes
from minipar.comm.point_to_point import PointToPoint, Sizes
from minipar.comm.reduction import find_reduction
from minipar.comm.ring import gathered_sizes
from minipar.comm.transport import native_calls
from minipar.comm.transport.errors import connection_broke, peer_lost
from minipar.comm.transport.process_groups import set_timeout
from minipar.support.chunks import check_sizes
from minipar.support.errors import one_of


def native(comm: PointToPoint, collective: str, x: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    """Run torch's collective of this name. Traffic counts the bytes of x once, under the kind "native"."""
    comm.traffic.book("native", x.nbytes)
    comm._transport.before_native(comm._channel, x)
    set_timeout([comm.process_group()], comm.timeout_s, comm.device)
    try:
        result: torch.Tensor | None = NATIVE[collective](comm, x.detach().contiguous(), **kwargs)
    except RuntimeError as error:
        if not connection_broke(error):
            raise
        own = comm.ranks[comm.rank]
        what = f"rank {own} could not finish torch's {collective} on {comm._channel.key}"
        others = one_of([f"rank {rank}" for rank in comm.ranks if rank != own])
        raise peer_lost(what, others, error) from None
    return result


def _all_reduce(
    comm: PointToPoint, x: torch.Tensor, op: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = x.clone() if out is None else out.copy_(x)
    native_calls.all_reduce_(out, _torch_name(op, x), comm.process_group())
    return out.div_(comm.size) if op == "mean" else out


def _reduce(comm: PointToPoint, x: torch.Tensor, root: int, op: str) -> torch.Tensor | None:
    out = x.clone()
    native_calls.reduce_(out, comm.ranks[root], _torch_name(op, x), comm.process_group())
    if comm.rank != root:
        return None
    return out.div_(comm.size) if op == "mean" else out


def _broadcast(
    comm: PointToPoint, x: torch.Tensor, root: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = x.clone() if out is None else out.copy_(x)
    native_calls.broadcast_(out, comm.ranks[root], comm.process_group())
    return out


def _reduce_scatter(
    comm: PointToPoint,
    x: torch.Tensor,
    op: str,
    sizes: Sizes = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    longest = max(sizes)  # torch's collective requires equal chunks
    padded = torch.cat([_pad(chunk, longest) for chunk in torch.split(x, sizes)])
    padded_own = x.new_empty((longest, *x.shape[1:]))
    native_calls.reduce_scatter(padded_own, padded, _torch_name(op, x), comm.process_group())
    own = padded_own[: sizes[comm.rank]]
    own = own.clone() if out is None else out.copy_(own)
    return own.div_(comm.size) if op == "mean" else own


def _all_gather(
    comm: PointToPoint, x: torch.Tensor, sizes: Sizes = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    sizes = gathered_sizes(comm, x, sizes)
    longest = max(sizes)
    padded = x.new_empty((comm.size * longest, *x.shape[1:]))
    native_calls.all_gather(padded, _pad(x, longest), comm.process_group())
    if out is None and min(sizes) == longest:
        return padded
    chunks = [chunk[:size] for chunk, size in zip(padded.chunk(comm.size), sizes)]
    return torch.cat(chunks) if out is None else torch.cat(chunks, out=out)


def _all_to_all(
    comm: PointToPoint,
    x: torch.Tensor,
    send_sizes: Sizes = None,
    recv_sizes: Sizes = None,
) -> torch.Tensor:
    send_sizes, recv_sizes = all_to_all_sizes(comm, x, send_sizes, recv_sizes)
    out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
    native_calls.all_to_all(out, x, recv_sizes, send_sizes, comm.process_group())
    return out


NATIVE: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _torch_name(op: str, x: torch.Tensor) -> str:
    return find_reduction(op, x.dtype).torch_name


def _pad(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return x with dim 0 lengthened to `length`; the padding is never read."""
    missing = length - x.shape[0]
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x
