"""Differentiable collectives, in conjugate pairs: the backward of each is the other of its pair.

`simple/autograd.py`, plus any dim, uneven chunks, send and receive, second derivatives.

    copy            x -> x                        backward: sum over ranks      (x is the same on every rank)
    all_reduce      x -> sum over ranks           backward: identity
    split           x -> this rank's chunk        backward: gather the chunks
    gather          chunks -> the whole           backward: this rank's chunk
    all_gather      chunks -> the whole           backward: reduce-scatter
    reduce_scatter  x -> this rank's chunk of the sum   backward: all-gather
    all_to_all      chunks transposed             backward: all-to-all with the sizes swapped
    send / recv     to a rank, from a rank        backward: recv / send

`gather` and `all_gather` have the same forward and differ in how the result is used. After `gather` every rank computes
the same from it, so every rank has the full gradient, and the backward takes this rank's chunk. After `all_gather` the
ranks compute different things, so the backward sums their gradients. Confusing the two is off by a factor of p.
Each backward is the adjoint: <y, A x> = <A^T y, x>, summed over ranks. A `grad_output` is never written to. Every
backward is itself one of these operators, so second derivatives (create_graph=True) are right too, but for send and
recv, which refuse them: the other rank would have to take part in a derivative that only one rank asks for.
Source: Megatron-LM, arXiv:1909.08053, section 3 (f and g); arXiv:2205.05198, section 4.2.2 (g and g-bar).
"""

from __future__ import annotations

import torch
from torch.autograd import Function

from minipar.chunks import check_sizes


class _Conjugate(Function):
    """An operator A of one tensor and its adjoint: y = A x, dx = A^T dy. The backward of the backward is A again."""

    @staticmethod
    def forward(ctx, x, operator, adjoint):
        ctx.operator, ctx.adjoint = operator, adjoint
        return operator(x)

    @staticmethod
    def backward(ctx, grad):
        return _Conjugate.apply(grad, ctx.adjoint, ctx.operator), None, None


class _PointToPoint(Function):
    """As `_Conjugate`, but differentiable once only."""

    @staticmethod
    def forward(ctx, x, operator, adjoint):
        ctx.adjoint = adjoint
        return operator(x)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True in a backward through comm.autograd.send or recv, which have no second derivative; "
                "use comm.autograd.all_to_all"
            )
        return ctx.adjoint(grad), None, None


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _on_dim(dim: int, collective):
    """Make `collective`, which acts on dim 0, act on `dim`."""
    if dim == 0:
        return collective
    return lambda x: collective(x.transpose(0, dim).contiguous()).transpose(0, dim).contiguous()


def copy(comm, x: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
    """Return x, equal on all ranks, which each rank uses differently. Backward: the sum over ranks, one all-reduce."""
    return _Conjugate.apply(x, _same, lambda g: comm.all_reduce(g, algorithm=algorithm))


def all_reduce(comm, x: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
    """Return the sum over ranks of x, which all ranks use in the same way. Backward: identity."""
    return _Conjugate.apply(x, lambda t: comm.all_reduce(t, algorithm=algorithm), _same)


def split(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """Return this rank's chunk of x, where x is equal on all ranks. Backward: all-gather of the chunks' gradients."""
    sizes = check_sizes(sizes, x.shape[dim], comm.size, "sizes", dim)
    return _Conjugate.apply(x, _chunk(comm, dim, sizes), _on_dim(dim, lambda g: comm.all_gather(g, sizes)))


def gather(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """All-gather the chunks; all ranks use the result in the same way. Backward: this rank's chunk of the gradient."""
    sizes = [x.shape[dim]] * comm.size if sizes is None else sizes
    return _Conjugate.apply(x, _on_dim(dim, lambda t: comm.all_gather(t, sizes)), _chunk(comm, dim, sizes))


def all_gather(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """All-gather the chunks; each rank uses the result differently. Backward: reduce-scatter."""
    sizes = [x.shape[dim]] * comm.size if sizes is None else sizes
    there, back = lambda t: comm.all_gather(t, sizes), lambda g: comm.reduce_scatter(g, sizes=sizes)
    return _Conjugate.apply(x, _on_dim(dim, there), _on_dim(dim, back))


def reduce_scatter(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """Return this rank's chunk of the sum over ranks of x. Backward: all-gather."""
    sizes = check_sizes(sizes, x.shape[dim], comm.size, "sizes", dim)
    there, back = lambda t: comm.reduce_scatter(t, sizes=sizes), lambda g: comm.all_gather(g, sizes)
    return _Conjugate.apply(x, _on_dim(dim, there), _on_dim(dim, back))


def all_to_all(comm, x: torch.Tensor, send_sizes=None, recv_sizes=None) -> torch.Tensor:
    """Send chunk s of x, along dim 0, to rank s. Backward: all-to-all with send_sizes and recv_sizes swapped."""
    send_sizes = check_sizes(send_sizes, x.shape[0], comm.size, "send_sizes")
    recv_sizes = [send_sizes[comm.rank]] * comm.size if recv_sizes is None else recv_sizes
    return _Conjugate.apply(
        x,
        lambda t: comm.all_to_all(t, send_sizes, recv_sizes),
        lambda g: comm.all_to_all(g, recv_sizes, send_sizes),
    )


def send(comm, x: torch.Tensor, to: int) -> torch.Tensor:
    """Send x to rank `to`. Returns an empty tensor: calling backward from it receives the gradient of x from `to`."""
    return _PointToPoint.apply(
        x, lambda t: _send_returning_empty(comm, t, to), lambda _: comm.recv(x.shape, x.dtype, to)
    )


def recv(comm, shape, dtype: torch.dtype, source: int) -> torch.Tensor:
    """Receive a tensor from rank `source`. Backward sends its gradient to `source`."""
    start = torch.empty(0, dtype=dtype, device=comm.device, requires_grad=True)
    return _PointToPoint.apply(
        start,
        lambda _: comm.recv(shape, dtype, source),
        lambda g: _send_returning_empty(comm, g.contiguous(), source),
    )


def _send_returning_empty(comm, x: torch.Tensor, to: int) -> torch.Tensor:
    comm.send(x, to)
    return x.new_empty(0)


def _chunk(comm, dim: int, sizes):
    start = sum(sizes[: comm.rank])
    return lambda x: x.narrow(dim, start, sizes[comm.rank]).contiguous()
