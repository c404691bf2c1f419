"""Recursive halving and doubling: exchanges with partners at distance p/2, p/4, ..., 1, so log p steps instead of p-1.

Costs (Thakur, Rabenseifner, Gropp 2005, sections 4.2-4.5), p a power of two, n bytes:

    reduce_scatter by halving         log p alpha + (p-1)/p n (beta + gamma)
    all_gather by doubling            log p alpha + (p-1)/p n beta
    all_reduce by both (Rabenseifner) 2 log p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma
    all_reduce by doubling alone      log p (alpha + n beta + n gamma): fewest steps, but every step sends all of x

Where p is not a power of two, let q be the largest power of two below p. Ranks below q are the core. Every rank r >= q
first sends its x to core rank r-q (fold in), and receives its result from that rank at the end (fold out): two more
steps, of at most n bytes each.

Let x be cut into q chunks as torch.chunk cuts. In the halving, a core rank sends every chunk but its own. In the
doubling, it sends the aligned blocks of 1, 2, 4, ..., q/2 chunks that contain its own.
"""

from __future__ import annotations

import torch

from minipar.chunks import bounds, check_sizes, chunk_sizes
from minipar.comm.reduction import exchange_and_add, find_reduction
from minipar.comm.ring import gathered_sizes


def all_reduce(comm, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Rabenseifner: recursive halving to reduce-scatter, recursive doubling to all-gather. Same bits on all ranks.

    Sends 2(p-1)/p of x where p is a power of two that divides its length. Otherwise a core rank sends as stated above,
    plus the result if another rank folded into it; a rank outside the core sends only x.
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
    """All-reduce in log p steps, each an exchange of all partial sums with a partner: fewest steps, for short vectors.

    Sends log2(p) times x where p is a power of two. Otherwise a core rank sends floor(log2 p) times x, plus the result
    if another rank folded into it; a rank outside the core sends x once.
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
    """Return this rank's chunk of the sum, x [N, ...] -> [sizes[r], ...]: each step sends the half that the partner keeps.

    Sends all of x but this rank's chunk where p is a power of two. Otherwise core rank r also reduces chunk r+q for rank
    r+q, and sends it there at the end. `out`, if given, receives the result; it may be this rank's chunk of x.
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
    """Concatenate every rank's x along dim 0: each step exchanges all chunks gathered so far, which doubles their number.

    Sends p-1 chunks where p is a power of two and all are equal. Otherwise a rank r >= q first sends its chunk to rank
    r-q, which gathers with both and sends it the result. `out`, if given, receives the result; x may already be in it.
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
    """List all chunks in the order of the core ranks that hold them: 0, q, 1, q+1, ... Core rank r holds r and r+q."""
    return [c for r in range(_core(p)) for c in range(r, p, _core(p))]


def _core_edges(p: int, lengths) -> list[int]:
    """Return the edges between the core ranks' elements, with the chunks in the order of `_carried`."""
    return bounds([sum(lengths[r :: _core(p)]) for r in range(_core(p))])


def _halve(comm, flat: torch.Tensor, edges, reduction) -> None:
    """Reduce-scatter in place among the core ranks: chunk `rank` of flat becomes the sum; the others hold partial sums."""
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
    """All-gather in place among the core ranks, each starting with chunk `rank` of flat: the steps of `_halve` reversed."""
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
    """Send x to a core rank and return None if outside the core, else return x combined with the x received, if any.

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


def _fold_out(comm, result: torch.Tensor) -> None:
    core = _core(comm.size)
    if comm.rank >= core:
        comm.exchange(None, None, result.shape, result.dtype, comm.rank - core, out=result)
    elif comm.rank + core < comm.size:
        comm.send(result, comm.rank + core)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1)
