"""Recursive halving and doubling: exchanges with partners at distance p/2, p/4, ..., 1, so log p steps instead of p-1.

Costs (Thakur, Rabenseifner, Gropp 2005, sections 4.2-4.5), p a power of two, n bytes:

    reduce_scatter by halving         log p alpha + (p-1)/p n (beta + gamma)
    all_gather by doubling            log p alpha + (p-1)/p n beta
    all_reduce by both (Rabenseifner) 2 log p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma
    all_reduce by doubling alone      log p (alpha + n beta + n gamma): fewest steps, but every step sends all of x

If p is not a power of two, let q be the largest power of two below p. Ranks below q are the core. Every rank r >= q
first sends its x to core rank r-q (fold in), and receives its result from that rank at the end (fold out): two more
steps, of at most n bytes each.

Let x be cut into q chunks as torch.chunk cuts. In the halving, a core rank sends every chunk but its own. In the doubling,
it sends the aligned blocks of 1, 2, 4, ..., q/2 chunks that contain its own chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm.point_to_point import PointToPoint, Sizes
from minipar.comm.reduction import Reduction, exchange_and_add, find_reduction
from minipar.comm.ring import flatten, gathered_sizes
from minipar.support.chunks import bounds, check_sizes, chunk_sizes


def all_reduce(comm: PointToPoint, x: Tensor, op: str = "sum", out: Tensor | None = None) -> Tensor:
    """All-reduce by Rabenseifner: a reduce-scatter by halving, an all-gather by doubling. Bitwise equal on all ranks.

    Sends 2(p-1)/p of x if p is a power of two that divides its length. Otherwise a core rank sends as stated above,
    plus the result if another rank folded into it; a rank outside the core sends only x.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    target = out.view(-1)
    reduction = find_reduction(op, x.dtype)
    edges = bounds(chunk_sizes(target.numel(), _core(comm.size)))  # only the core ranks own chunks
    sums = _fold_in(comm, flatten(x), reduction)
    if sums is not None:
        if sums.data_ptr() != target.data_ptr():
            target.copy_(sums)
        _halve(comm, target, edges, reduction)
        if reduction.divide:
            target[edges[comm.rank] : edges[comm.rank + 1]].div_(comm.size)
        _double(comm, target, edges)
    _fold_out(comm, target)
    return out


def all_reduce_by_doubling(
    comm: PointToPoint, x: Tensor, op: str = "sum", out: Tensor | None = None
) -> Tensor:
    """All-reduce in log p steps, each an exchange of all partial sums with a partner: fewest steps, for short vectors.

    Sends log2(p) times x if p is a power of two. Otherwise a core rank sends floor(log2 p) times x, plus the result
    if another rank folded into it; a rank outside the core sends x once.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    target = out.view(-1)
    reduction = find_reduction(op, x.dtype)
    sums = _fold_in(comm, flatten(x), reduction)
    if sums is not None:
        for distance in _distances(comm.size):
            partner = comm.rank ^ distance
            sums = exchange_and_add(comm, sums, partner, sums, partner, reduction, out=target)
        if sums is not target:  # in a group of one nothing was exchanged
            target.copy_(sums)
        if reduction.divide:
            target.div_(comm.size)
    _fold_out(comm, target)
    return out


def reduce_scatter(
    comm: PointToPoint,
    x: Tensor,
    op: str = "sum",
    sizes: Sizes = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's chunk of the sum, x [N, ...] -> [sizes[r], ...]: each step sends the half that the partner keeps.

    Sends all of x except this rank's chunk if p is a power of two. Otherwise core rank r also reduces chunk r+q for rank
    r+q, and sends it there at the end. `out`, if given, receives the result; it may be this rank's chunk of x.
    """
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    reduction = find_reduction(op, x.dtype)
    core = _core(comm.size)
    if out is None:
        out = x.new_empty((sizes[comm.rank], *x.shape[1:]))
    sums = _fold_in(comm, x.detach().contiguous(), reduction)
    if sums is None:
        comm.exchange(None, None, out.shape, out.dtype, comm.rank - core, out=out)
        return out
    chunks = torch.split(sums, sizes)
    work = torch.cat([chunks[c].reshape(-1) for c in chunk_order(comm.size)])
    edges = _core_edges(comm.size, [chunk.numel() for chunk in chunks])
    _halve(comm, work, edges, reduction)
    own = work[edges[comm.rank] : edges[comm.rank + 1]]
    if reduction.divide:
        own.div_(comm.size)
    if comm.rank + core < comm.size:
        comm.send(own[out.numel() :], comm.rank + core)
    return out.copy_(own[: out.numel()].view(out.shape))


def all_gather(comm: PointToPoint, x: Tensor, sizes: Sizes = None, out: Tensor | None = None) -> Tensor:
    """Concatenate every rank's x along dim 0: each step exchanges all chunks gathered so far, which doubles their number.

    Sends p-1 chunks if p is a power of two and all chunks are equal. Otherwise let q be the largest power of two below p: a
    rank r >= q first sends its chunk to rank r-q, which gathers with both chunks and sends back the result. `out`, if
    given, receives the result; x may already be in it.
    """
    sizes = gathered_sizes(comm, x, sizes)
    core = _core(comm.size)
    if out is None:
        out = x.new_empty((sum(sizes), *x.shape[1:]))
    if comm.rank >= core:
        comm.send(x, comm.rank - core)
        comm.exchange(None, None, out.shape, out.dtype, comm.rank - core, out=out)
        return out
    lengths = [size * x.shape[1:].numel() for size in sizes]
    edges = _core_edges(comm.size, lengths)
    work = out.view(-1) if core == comm.size else torch.empty_like(out).view(-1)
    own = work[edges[comm.rank] : edges[comm.rank + 1]]
    flat = flatten(x)  # a copy, if x is a transposed view of `out`
    if own.data_ptr() != flat.data_ptr():
        own[: x.numel()].copy_(flat)
    if comm.rank + core < comm.size:
        theirs = own[x.numel() :]
        comm.exchange(None, None, theirs.shape, theirs.dtype, comm.rank + core, out=theirs)
    _double(comm, work, edges)
    if core < comm.size:
        order = chunk_order(comm.size)
        chunks = torch.split(out.view(-1), lengths)
        for c, chunk in zip(order, torch.split(work, [lengths[c] for c in order])):
            chunks[c].copy_(chunk)
    if comm.rank + core < comm.size:
        comm.send(out, comm.rank + core)
    return out


# The steps


def _core(p: int) -> int:
    """Return the largest power of two that is at most p, the number of core ranks."""
    return 1 << (p.bit_length() - 1)


def _distances(p: int) -> list[int]:
    """Return the distances between partners among the q core ranks: q/2, q/4, ..., 1."""
    core = _core(p)
    return [core >> i for i in range(1, core.bit_length())]


def chunk_order(p: int) -> list[int]:
    """List all chunks in the order of the core ranks that hold them: 0, q, 1, q+1, ... Core rank r holds r and r+q."""
    return [c for r in range(_core(p)) for c in range(r, p, _core(p))]


def _core_edges(p: int, lengths: Sequence[int]) -> list[int]:
    """Return the edges between the core ranks' elements, with the chunks in the order of `chunk_order`."""
    return bounds([sum(lengths[r :: _core(p)]) for r in range(_core(p))])


def _halve(comm: PointToPoint, flat: Tensor, edges: list[int], reduction: Reduction) -> None:
    """Reduce-scatter in place among the core ranks: chunk `rank` of flat gets the sum; other chunks hold partial sums."""
    low, high = 0, len(edges) - 1  # the range of chunks still to be summed here
    for distance in _distances(comm.size):
        partner = comm.rank ^ distance
        middle = low + distance
        lower, upper = _between(flat, edges, low, middle), _between(flat, edges, middle, high)
        if comm.rank < partner:
            mine, theirs, high = lower, upper, middle
        else:
            mine, theirs, low = upper, lower, middle
        exchange_and_add(comm, theirs, partner, mine, partner, reduction, out=mine)


def _double(comm: PointToPoint, flat: Tensor, edges: list[int]) -> None:
    """All-gather in place among the core ranks, each starting with chunk `rank` of flat: the steps of `_halve` reversed."""
    for distance in reversed(_distances(comm.size)):
        partner = comm.rank ^ distance
        have = comm.rank // distance * distance
        want = have ^ distance
        mine = _between(flat, edges, have, have + distance)
        missing = _between(flat, edges, want, want + distance)
        comm.exchange(mine, partner, missing.shape, missing.dtype, partner, out=missing)


def _between(flat: Tensor, edges: list[int], first: int, last: int) -> Tensor:
    return flat[edges[first] : edges[last]]


def _fold_in(comm: PointToPoint, x: Tensor, reduction: Reduction) -> Tensor | None:
    """Outside the core, send x to a core rank and return None. In the core, return x combined with any x received.

    A core rank into which no rank folds returns x itself, which must not be written to.
    """
    core = _core(comm.size)
    if comm.rank >= core:
        comm.send(x, comm.rank - core)
        return None
    if comm.rank + core < comm.size:
        received = comm.recv(x.shape, x.dtype, comm.rank + core)
        return reduction.combine(x, received, out=received)
    return x


def _fold_out(comm: PointToPoint, result: Tensor) -> None:
    core = _core(comm.size)
    if comm.rank >= core:
        comm.exchange(None, None, result.shape, result.dtype, comm.rank - core, out=result)
    elif comm.rank + core < comm.size:
        comm.send(result, comm.rank + core)
