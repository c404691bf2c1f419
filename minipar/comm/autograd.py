"""Collectives one can differentiate through. They come in conjugate pairs: the backward of one is the other.

`simple/autograd.py`, plus any dim, uneven chunks, send and receive, second derivatives.

    copy            x -> x                        backward: sum over ranks      (x is the same on every rank)
    all_reduce      x -> sum over ranks           backward: identity
    split           x -> this rank's chunk        backward: gather the chunks
    gather          chunks -> the whole           backward: this rank's chunk
    all_gather      chunks -> the whole           backward: reduce-scatter
    reduce_scatter  x -> this rank's chunk of the sum   backward: all-gather
    all_to_all      chunks transposed             backward: all-to-all, the other way
    send / recv     to a rank, from a rank        backward: recv / send

`gather` and `all_gather` compute the same. They differ in who uses the result: after `gather` every rank computes the
same thing from it, so each rank's gradient is already whole and its own chunk is taken; after `all_gather` ranks compute
different things, and their gradients are summed. Taking the wrong one of the two is off by a factor of p.
Each is an adjoint: <y, A x> = <A^T y, x>, summed over ranks. A `grad_output` is never written to. Since a backward is
itself one of these operators, second derivatives (create_graph=True) are right too.
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


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _along(dim: int, collective):
    """The collective, which acts on dim 0, along another dim."""
    if dim == 0:
        return collective
    return lambda x: collective(x.transpose(0, dim).contiguous()).transpose(0, dim).contiguous()


def copy(comm, x: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
    """x, the same on every rank, about to be used differently on each. Backward sums: one all-reduce."""
    return _Conjugate.apply(x, _same, lambda g: comm.all_reduce(g, algorithm=algorithm))


def all_reduce(comm, x: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
    """The sum over ranks, from which every rank computes the same. Backward: the gradient as it is."""
    return _Conjugate.apply(x, lambda t: comm.all_reduce(t, algorithm=algorithm), _same)


def split(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """This rank's chunk of x, the same on every rank. Backward: all-gather of the chunks' gradients."""
    sizes = check_sizes(sizes, x.shape[dim], comm.size, "sizes", dim)
    return _Conjugate.apply(x, _chunk(comm, dim, sizes), _along(dim, lambda g: comm.all_gather(g, sizes)))


def gather(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """The chunks of all ranks, from which every rank computes the same. Backward: this rank's chunk of the gradient."""
    sizes = [x.shape[dim]] * comm.size if sizes is None else sizes
    return _Conjugate.apply(x, _along(dim, lambda t: comm.all_gather(t, sizes)), _chunk(comm, dim, sizes))


def all_gather(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """The chunks of all ranks, which each rank uses differently. Backward: reduce-scatter."""
    sizes = [x.shape[dim]] * comm.size if sizes is None else sizes
    there, back = lambda t: comm.all_gather(t, sizes), lambda g: comm.reduce_scatter(g, sizes=sizes)
    return _Conjugate.apply(x, _along(dim, there), _along(dim, back))


def reduce_scatter(comm, x: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """This rank's chunk of the sum over ranks. Backward: all-gather."""
    sizes = check_sizes(sizes, x.shape[dim], comm.size, "sizes", dim)
    there, back = lambda t: comm.reduce_scatter(t, sizes=sizes), lambda g: comm.all_gather(g, sizes)
    return _Conjugate.apply(x, _along(dim, there), _along(dim, back))


def all_to_all(comm, x: torch.Tensor, send_sizes=None, recv_sizes=None) -> torch.Tensor:
    """Chunk s to rank s, along dim 0. Backward: the same with the sizes exchanged."""
    send_sizes = check_sizes(send_sizes, x.shape[0], comm.size, "send_sizes")
    recv_sizes = [send_sizes[comm.rank]] * comm.size if recv_sizes is None else recv_sizes
    return _Conjugate.apply(
        x,
        lambda t: comm.all_to_all(t, send_sizes, recv_sizes),
        lambda g: comm.all_to_all(g, recv_sizes, send_sizes),
    )


def send(comm, x: torch.Tensor, to: int) -> torch.Tensor:
    """Send x to rank `to`. Returns an empty tensor to call backward from, which receives the gradient of x there."""
    return _Conjugate.apply(x, lambda t: _sent(comm, t, to), lambda _: comm.recv(x.shape, x.dtype, to))


def recv(comm, shape, dtype: torch.dtype, source: int) -> torch.Tensor:
    """Receive a tensor from rank `source`. Backward sends its gradient there."""
    start = torch.empty(0, dtype=dtype, device=comm.device, requires_grad=True)
    return _Conjugate.apply(
        start, lambda _: comm.recv(shape, dtype, source), lambda g: _sent(comm, g.contiguous(), source)
    )


def _sent(comm, x: torch.Tensor, to: int) -> torch.Tensor:
    comm.send(x, to)
    return x.new_empty(0)


def _chunk(comm, dim: int, sizes):
    start = sum(sizes[: comm.rank])
    return lambda x: x.narrow(dim, start, sizes[comm.rank]).contiguous()
