"""Recursive halving and doubling: partners at distance p/2, p/4, ... 1, so log p steps instead of p-1.

Costs (Thakur, Rabenseifner, Gropp 2005, sections 4.2-4.5), p a power of two, n bytes:

    reduce_scatter by halving         log p alpha + (p-1)/p n (beta + gamma)
    all_gather by doubling            log p alpha + (p-1)/p n beta
    all_reduce by both (Rabenseifner) 2 log p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma
    all_reduce by doubling alone      log p (alpha + n beta + n gamma): fewest steps, but every step sends all of x

Where p is not a power of two, the ranks past the largest one, q, first hand their x to rank r-q and get the result
from it: one more step in and one out, with n bytes in it for the ranks concerned.
"""

from __future__ import annotations

import torch

from minipar.comm.chunks import bounds, check_sizes, chunk_sizes, reduction
from minipar.comm.ring import gathered_sizes


def all_reduce(comm, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Rabenseifner: recursive halving to reduce-scatter, recursive doubling to all-gather. Same bits on all ranks.

    Sends 2(p-1)/p of x where p is a power of two that divides its length.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    target, how = out.view(-1), reduction(op, x.dtype)
    sizes = chunk_sizes(
        target.numel(), _core(comm.size)
    )  # only the core ranks own chunks; the others get a copy
    sums = _fold_in(comm, x.detach().contiguous().view(-1), how)
    if sums is not None:
        target.copy_(sums)
        pieces = list(target.split(sizes))
        _halve(comm, pieces, how)
        if how.divide:
            pieces[comm.rank].div_(comm.size)
        _double(comm, pieces)
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
    target, how = out.view(-1), reduction(op, x.dtype)
    sums = _fold_in(comm, x.detach().contiguous().view(-1), how)
    if sums is not None:
        for distance in _distances(comm.size):
            partner = comm.rank ^ distance
            received = comm.scratch(target.numel(), x.dtype)
            comm.exchange(sums, partner, sums.shape, sums.dtype, partner, out=received)
            sums = how.combine(sums, received, out=target)
        if sums is not target:
            target.copy_(sums)
        if how.divide:
            target.div_(comm.size)
    _fold_out(comm, target)
    return out


def reduce_scatter(
    comm, x: torch.Tensor, op: str = "sum", sizes=None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rank r's chunk of the sum, x [N, ...] -> [sizes[r], ...]: each step send the half the partner's side will own.

    Sends all of x but this rank's chunk where p is a power of two. Elsewhere core rank r also reduces chunk r+q, for
    the rank that folded its x into it.
    """
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    how, core = reduction(op, x.dtype), _core(comm.size)
    out = x.new_empty((sizes[comm.rank], *x.shape[1:])) if out is None else out
    sums = _fold_in(comm, x.detach().contiguous(), how)
    if sums is None:
        return comm.exchange(None, None, out.shape, out.dtype, comm.rank - core, out=out)
    chunks = sums.split(sizes)
    groups = [torch.cat(chunks[r::core]) for r in range(core)]  # chunk r, and with it chunk r + q
    _halve(comm, groups, how)
    mine, *theirs = groups[comm.rank].split(sizes[comm.rank :: core])
    if how.divide:
        groups[comm.rank].div_(comm.size)
    for chunk in theirs:
        comm.send(chunk, comm.rank + core)
    return out.copy_(mine)


def all_gather(comm, x: torch.Tensor, sizes=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank's x along dim 0: each step exchange all one has, so that what one has doubles.

    Sends p-1 chunks where p is a power of two and all are alike. Elsewhere a rank past q first hands its chunk to rank
    r-q, which carries both and sends it the whole at the end.
    """
    sizes = gathered_sizes(comm, x, sizes)
    core, rest = _core(comm.size), x.shape[1:]
    edges = bounds(sizes)
    out = x.new_empty((edges[-1], *rest)) if out is None else out
    if comm.rank >= core:
        comm.send(x, comm.rank - core)
        return comm.exchange(None, None, out.shape, out.dtype, comm.rank - core, out=out)
    carried = [x.detach()]
    if comm.rank + core < comm.size:
        carried.append(comm.recv((sizes[comm.rank + core], *rest), x.dtype, comm.rank + core))
    groups = [x.new_empty((sum(sizes[r::core]), *rest)) for r in range(core)]
    groups[comm.rank] = torch.cat(carried)
    _double(comm, groups)
    for r, group in enumerate(groups):
        for c, chunk in zip(range(r, comm.size, core), group.split(sizes[r::core])):
            out[edges[c] : edges[c + 1]] = chunk
    if comm.rank + core < comm.size:
        comm.send(out, comm.rank + core)
    return out


# The steps ------------------------------------------------------------------------------------------------------


def _core(p: int) -> int:
    """The largest power of two that is at most p."""
    return 1 << (p.bit_length() - 1)


def _distances(p: int) -> list[int]:
    """p/2, p/4, ..., 1 among the core ranks."""
    core = _core(p)
    return [core >> i for i in range(1, core.bit_length())]


def _halve(comm, pieces: list[torch.Tensor], how) -> None:
    """Reduce-scatter among the core ranks: afterwards pieces[rank] holds the sum. The others are left half summed."""
    low, high = 0, len(pieces)  # the pieces still to be reduced here
    for distance in _distances(comm.size):
        partner, middle = comm.rank ^ distance, low + distance
        keep, give = (low, middle), (middle, high)
        if comm.rank & distance:
            keep, give = give, keep
        received = comm.scratch(sum(p.numel() for p in pieces[slice(*keep)]), pieces[0].dtype)
        comm.exchange(
            _join_flat(pieces[slice(*give)]), partner, received.shape, received.dtype, partner, out=received
        )
        for piece, part in zip(
            pieces[slice(*keep)], received.split([p.numel() for p in pieces[slice(*keep)]])
        ):
            how.combine(piece, part.view(piece.shape), out=piece)
        low, high = keep


def _double(comm, pieces: list[torch.Tensor]) -> None:
    """All-gather among the core ranks, each beginning with pieces[rank]: the halving, run backwards."""
    for distance in reversed(_distances(comm.size)):
        partner = comm.rank ^ distance
        have = comm.rank // distance * distance
        want = have ^ distance
        shape = (sum(p.numel() for p in pieces[want : want + distance]),)
        mine = _join_flat(pieces[have : have + distance])
        received = comm.exchange(
            mine, partner, shape, mine.dtype, partner, out=comm.scratch(*shape, mine.dtype)
        )
        missing = pieces[want : want + distance]
        for piece, part in zip(missing, received.split([p.numel() for p in missing])):
            piece.copy_(part.view(piece.shape))


def _fold_in(comm, x: torch.Tensor, how) -> torch.Tensor | None:
    """Ranks past the power of two hand x to a core rank and return None; core ranks return what they now have.

    The result is a tensor that may be written to, except where nothing was folded into it.
    """
    core = _core(comm.size)
    if comm.rank >= core:
        comm.send(x, comm.rank - core)
        return None
    if comm.rank + core < comm.size:
        received = comm.recv(x.shape, x.dtype, comm.rank + core)
        return how.combine(x, received, out=received)
    return x


def _fold_out(comm, result: torch.Tensor) -> None:
    core = _core(comm.size)
    if comm.rank >= core:
        comm.exchange(None, None, result.shape, result.dtype, comm.rank - core, out=result)
    elif comm.rank + core < comm.size:
        comm.send(result, comm.rank + core)


def _join_flat(tensors) -> torch.Tensor:
    """The tensors as one flat one; neighbours in one storage are joined without a copy."""
    first = tensors[0]
    num_elems = sum(t.numel() for t in tensors)
    if len(tensors) == 1:
        return first.reshape(-1)
    same = all(t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for t in tensors)
    offset, follows = first.storage_offset(), same
    for t in tensors:
        follows = follows and t.storage_offset() == offset and t.is_contiguous()
        offset += t.numel()
    return first.as_strided((num_elems,), (1,)) if follows else torch.cat([t.reshape(-1) for t in tensors])
