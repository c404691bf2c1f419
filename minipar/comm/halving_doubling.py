"""Recursive halving and doubling: partners at distance p/2, p/4, ... 1, so log p steps instead of p-1.

Costs (Thakur, Rabenseifner, Gropp 2005, sections 4.2-4.5), p a power of two, n bytes:

    reduce_scatter by halving         log p alpha + (p-1)/p n (beta + gamma)
    all_gather by doubling            log p alpha + (p-1)/p n beta
    all_reduce by both (Rabenseifner) 2 log p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma
    all_reduce by doubling alone      log p (alpha + n beta + n gamma): fewest steps, but every step sends all of x

Where p is not a power of two, the ranks past the largest one below it, q, first hand their x to rank r-q and get the
result from it: one more step in and one out, with n bytes in it for the ranks concerned. The q others are the core.

What a rank sends, exactly, of x cut into q chunks as torch.chunk cuts: halving sends all but its own chunk; doubling the
aligned block of 1, 2, 4, ... q/2 chunks in which its own lies.
"""

from __future__ import annotations

import torch

from minipar.chunks import bounds, check_sizes, chunk_sizes
from minipar.comm.reduction import exchange_and_add, find_reduction
from minipar.comm.ring import gathered_sizes


def all_reduce(comm, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Rabenseifner: recursive halving to reduce-scatter, recursive doubling to all-gather. Same bits on all ranks.

    Sends 2(p-1)/p of x where p is a power of two that divides its length. Elsewhere the halving and the doubling above;
    a rank past the core sends x instead, and the rank it folds into the result as well.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    target, reduction = out.view(-1), find_reduction(op, x.dtype)
    edges = bounds(chunk_sizes(target.numel(), _core(comm.size)))  # only the core ranks own chunks
    sums = _fold_in(comm, _flat(x), reduction)
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
    comm, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Every step exchange all of x with a partner twice as far away: the fewest steps there are, for short vectors.

    Sends log2(p) times x where p is a power of two; else floor(log2 p) times on the core ranks, and once more on those
    that fold in (their x) and on those that fold out (the result).
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    target, reduction = out.view(-1), find_reduction(op, x.dtype)
    sums = _fold_in(comm, _flat(x), reduction)
    if sums is not None:
        for distance in _distances(comm.size):
            partner = comm.rank ^ distance
            sums = exchange_and_add(comm, sums, partner, sums, partner, reduction, out=target)
        if sums is not target:  # alone
            target.copy_(sums)
        if reduction.divide:
            target.div_(comm.size)
    _fold_out(comm, target)
    return out


def reduce_scatter(
    comm, x: torch.Tensor, op: str = "sum", sizes=None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rank r's chunk of the sum, x [N, ...] -> [sizes[r], ...]: each step send the half the partner's side will own.

    Sends all of x but this rank's chunk where p is a power of two. Elsewhere core rank r also reduces chunk r+q, for
    the rank that folded its x into it, and sends it on. `out`, where to put it, may be that chunk of x itself.
    """
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    reduction, core = find_reduction(op, x.dtype), _core(comm.size)
    out = x.new_empty((sizes[comm.rank], *x.shape[1:])) if out is None else out
    sums = _fold_in(comm, x.detach().contiguous(), reduction)
    if sums is None:
        return comm.exchange(None, None, out.shape, out.dtype, comm.rank - core, out=out)
    chunks, order = sums.split(sizes), _carried(comm.size)
    work = torch.cat([chunks[c].reshape(-1) for c in order])
    edges = _core_edges(comm.size, [chunk.numel() for chunk in chunks])
    _halve(comm, work, edges, reduction)
    own = work[edges[comm.rank] : edges[comm.rank + 1]]
    if reduction.divide:
        own.div_(comm.size)
    if comm.rank + core < comm.size:
        comm.send(own[out.numel() :], comm.rank + core)
    return out.copy_(own[: out.numel()].view(out.shape))


def all_gather(comm, x: torch.Tensor, sizes=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank's x along dim 0: each step exchange all one has, so that what one has doubles.

    Sends p-1 chunks where p is a power of two and all are alike. Elsewhere a rank past q first hands its chunk to rank
    r-q, which carries both and sends it the whole at the end. `out`, where to put it, may have x in its place already.
    """
    sizes = gathered_sizes(comm, x, sizes)
    core, row_elems = _core(comm.size), x.shape[1:].numel()
    out = x.new_empty((sum(sizes), *x.shape[1:])) if out is None else out
    if comm.rank >= core:
        comm.send(x, comm.rank - core)
        return comm.exchange(None, None, out.shape, out.dtype, comm.rank - core, out=out)
    lengths = [size * row_elems for size in sizes]
    order, edges = _carried(comm.size), _core_edges(comm.size, lengths)
    work = out.view(-1) if core == comm.size else torch.empty_like(out).view(-1)
    own = work[edges[comm.rank] : edges[comm.rank + 1]]
    if own.data_ptr() != x.data_ptr():
        own[: x.numel()].copy_(_flat(x))
    if comm.rank + core < comm.size:
        theirs = own[x.numel() :]
        comm.exchange(None, None, theirs.shape, theirs.dtype, comm.rank + core, out=theirs)
    _double(comm, work, edges)
    if core < comm.size:
        chunks = out.view(-1).split(lengths)
        for c, chunk in zip(order, work.split([lengths[c] for c in order])):
            chunks[c].copy_(chunk)
    if comm.rank + core < comm.size:
        comm.send(out, comm.rank + core)
    return out


# The steps ------------------------------------------------------------------------------------------------------


def _core(p: int) -> int:
    """The largest power of two that is at most p."""
    return 1 << (p.bit_length() - 1)


def _distances(p: int) -> list[int]:
    """q/2, q/4, ..., 1 among the q core ranks."""
    core = _core(p)
    return [core >> i for i in range(1, core.bit_length())]


def _carried(p: int) -> list[int]:
    """All chunks in the order in which the core ranks carry them: 0, q, 1, q+1, ..."""
    return [c for r in range(_core(p)) for c in range(r, p, _core(p))]


def _core_edges(p: int, lengths) -> list[int]:
    """Where what each core rank carries begins in the chunks of that order."""
    return bounds([sum(lengths[r :: _core(p)]) for r in range(_core(p))])


def _halve(comm, flat: torch.Tensor, edges, reduction) -> None:
    """Reduce-scatter among the core ranks: afterwards chunk `rank` of flat is the sum. The others are half summed."""
    low, high = 0, len(edges) - 1  # the chunks still to be summed here
    for distance in _distances(comm.size):
        partner, middle = comm.rank ^ distance, low + distance
        keep, hand_over = (
            ((middle, high), (low, middle)) if comm.rank & distance else ((low, middle), (middle, high))
        )
        mine, theirs = _between(flat, edges, *keep), _between(flat, edges, *hand_over)
        exchange_and_add(comm, theirs, partner, mine, partner, reduction, out=mine)
        low, high = keep


def _double(comm, flat: torch.Tensor, edges) -> None:
    """All-gather among the core ranks, each beginning with chunk `rank` of flat: the halving, run backwards."""
    for distance in reversed(_distances(comm.size)):
        partner = comm.rank ^ distance
        have = comm.rank // distance * distance
        want = have ^ distance
        mine = _between(flat, edges, have, have + distance)
        missing = _between(flat, edges, want, want + distance)
        comm.exchange(mine, partner, missing.shape, missing.dtype, partner, out=missing)


def _between(flat: torch.Tensor, edges, first: int, last: int) -> torch.Tensor:
    return flat[edges[first] : edges[last]]


def _fold_in(comm, x: torch.Tensor, reduction) -> torch.Tensor | None:
    """Ranks past the power of two hand x to a core rank and return None; core ranks return what they now have.

    The result is a tensor that may be written to, except where nothing was folded into it.
    """
    core = _core(comm.size)
    if comm.rank >= core:
        comm.send(x, comm.rank - core)
        return None
    if comm.rank + core < comm.size:
        received = comm.recv(x.shape, x.dtype, comm.rank + core)
        return reduction.combine(x, received, out=received)
    return x


def _fold_out(comm, result: torch.Tensor) -> None:
    core = _core(comm.size)
    if comm.rank >= core:
        comm.exchange(None, None, result.shape, result.dtype, comm.rank - core, out=result)
    elif comm.rank + core < comm.size:
        comm.send(result, comm.rank + core)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1)
