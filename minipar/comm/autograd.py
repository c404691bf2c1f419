"""Differentiable collectives in conjugate pairs: the backward of a collective is its partner in the pair.

Adds to `simple/autograd.py`: any dim, uneven chunks, send and receive, second derivatives.

    copy            x -> x                        backward: sum over ranks      (x is the same on every rank)
    all_reduce      x -> sum over ranks           backward: identity
    split           x -> this rank's chunk        backward: gather the chunks
    gather          chunks -> the whole           backward: this rank's chunk
    all_gather      chunks -> the whole           backward: reduce-scatter
    reduce_scatter  x -> this rank's chunk of the sum   backward: all-gather
    all_to_all      chunks transposed             backward: all-to-all with the sizes swapped
    send / recv     to a rank, from a rank        backward: recv / send

`gather` and `all_gather` have the same forward and differ in how the result is used. After `gather` all ranks use the
result the same way, so each has the full gradient, and the backward takes this rank's chunk. After `all_gather` each rank
uses the result differently, so the backward sums the ranks' gradients. Confusing the two makes gradients wrong by a factor
of p.
Each backward is the adjoint: <y, A x> = <A^T y, x>, summed over ranks. A `grad_output` is never written to. Every
backward is itself one of these operators, so second derivatives (create_graph=True) are right, too. Only send and recv
refuse second derivatives, because the other rank would have to take part.
Source: Megatron-LM, arXiv:1909.08053, section 3 (f and g); arXiv:2205.05198, section 4.2.2 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from minipar.comm.communicator import Comm
from minipar.support.chunks import check_sizes

Operator = Callable[[Tensor], Tensor]


class _Conjugate(Function):
    """An operator A of one tensor and its adjoint: y = A x, dx = A^T dy. The backward of the backward is A again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Operator, adjoint: Operator) -> Tensor:
        ctx.operator, ctx.adjoint = operator, adjoint
        return operator(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _conjugate(grad, ctx.adjoint, ctx.operator), None, None


def _conjugate(x: Tensor, operator: Operator, adjoint: Operator) -> Tensor:
    y: Tensor = _Conjugate.apply(x, operator, adjoint)  # type: ignore[no-untyped-call]
    return y


def refuse_second_derivatives(of: str, instead: str = "DDP or ZeroOptimizer for a gradient penalty") -> None:
    """Raise RuntimeError in a backward with create_graph=True; call it where autograd cannot follow the backward.

    `once_differentiable` would not do: it lets a backward pass whose incoming gradient is a constant, as a loss's is.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True in a backward through {of}, whose second derivative would be wrong; use {instead}"
        )


class _PointToPoint(Function):
    """An operator and its adjoint, as in `_Conjugate`, but differentiable only once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Operator, adjoint: Operator) -> Tensor:
        ctx.adjoint = adjoint
        return operator(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives("comm.autograd.send or recv", "comm.autograd.all_to_all")
        return ctx.adjoint(grad), None, None


def _once(x: Tensor, operator: Operator, adjoint: Operator) -> Tensor:
    y: Tensor = _PointToPoint.apply(x, operator, adjoint)  # type: ignore[no-untyped-call]
    return y


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _on_dim(dim: int, collective: Operator) -> Operator:
    """Return an operator that does along `dim` what `collective` does along dim 0."""
    if dim == 0:
        return collective
    return lambda x: collective(x.transpose(0, dim).contiguous()).transpose(0, dim).contiguous()


def copy(comm: Comm, x: Tensor, algorithm: str = "auto") -> Tensor:
    """Return x, which is equal on all ranks, for uses that differ by rank. Backward: the sum over ranks, one all-reduce."""
    return _conjugate(x, _same, lambda g: comm.all_reduce(g, algorithm=algorithm))


def all_reduce(comm: Comm, x: Tensor, algorithm: str = "auto") -> Tensor:
    """Return the sum over ranks of x, for a use that is the same on all ranks. Backward: identity."""
    return _conjugate(x, lambda t: comm.all_reduce(t, algorithm=algorithm), _same)


def split(comm: Comm, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's chunk of x, which is equal on all ranks. Backward: all-gather of the chunks' gradients."""
    sizes = check_sizes(sizes, x.shape[dim], comm.size, "sizes", dim)
    return _conjugate(x, _chunk(comm, dim, sizes), _on_dim(dim, lambda g: comm.all_gather(g, sizes)))


def gather(comm: Comm, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """All-gather the chunks, for a result that all ranks use the same way. Backward: this rank's chunk of the gradient."""
    sizes = [x.shape[dim]] * comm.size if sizes is None else sizes
    return _conjugate(x, _on_dim(dim, lambda t: comm.all_gather(t, sizes)), _chunk(comm, dim, sizes))


def all_gather(comm: Comm, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """All-gather the chunks, for a result that each rank uses differently. Backward: reduce-scatter."""
    sizes = [x.shape[dim]] * comm.size if sizes is None else sizes
    return _conjugate(
        x,
        _on_dim(dim, lambda t: comm.all_gather(t, sizes)),
        _on_dim(dim, lambda g: comm.reduce_scatter(g, sizes=sizes)),
    )


def reduce_scatter(comm: Comm, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's chunk of the sum over ranks of x. Backward: all-gather."""
    sizes = check_sizes(sizes, x.shape[dim], comm.size, "sizes", dim)
    return _conjugate(
        x,
        _on_dim(dim, lambda t: comm.reduce_scatter(t, sizes=sizes)),
        _on_dim(dim, lambda g: comm.all_gather(g, sizes)),
    )


def all_to_all(
    comm: Comm, x: Tensor, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
) -> Tensor:
    """Send chunk s of x, along dim 0, to rank s. Backward: all-to-all with send_sizes and recv_sizes swapped."""
    send_sizes = check_sizes(send_sizes, x.shape[0], comm.size, "send_sizes")
    recv_sizes = [send_sizes[comm.rank]] * comm.size if recv_sizes is None else recv_sizes
    return _conjugate(
        x,
        lambda t: comm.all_to_all(t, send_sizes, recv_sizes),
        lambda g: comm.all_to_all(g, recv_sizes, send_sizes),
    )


def send(comm: Comm, x: Tensor, to: int) -> Tensor:
    """Send x to rank `to`. Returns an empty tensor: calling backward from it receives the gradient of x from `to`."""
    shape, dtype = x.shape, x.dtype  # x itself is not kept until the backward
    return _once(x, lambda t: _send_returning_empty(comm, t, to), lambda _: comm.recv(shape, dtype, to))


def recv(comm: Comm, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
    """Receive a tensor from rank `source`. Backward sends its gradient to `source`."""
    start = torch.empty(0, dtype=dtype, device=comm.device, requires_grad=True)
    return _once(
        start,
        lambda _: comm.recv(shape, dtype, source),
        lambda g: _send_returning_empty(comm, g, source),
    )


def _send_returning_empty(comm: Comm, x: Tensor, to: int) -> Tensor:
    comm.send(x, to)
    return x.new_empty(0)


def _chunk(comm: Comm, dim: int, sizes: Sequence[int]) -> Operator:
    start = sum(sizes[: comm.rank])
    return lambda x: x.narrow(dim, start, sizes[comm.rank]).contiguous()
