"""Ring collectives: everybody sends to the right and receives from the left, one chunk a step.

The bandwidth-optimal family: no rank sends a byte more than it must. Latency grows with the number of ranks.

Costs, with p ranks, n bytes in the whole vector, latency alpha, seconds per byte beta, seconds to add a byte gamma
(Thakur, Rabenseifner, Gropp 2005, sections 4.1-4.5):

    reduce_scatter   (p-1) alpha + (p-1)/p n (beta + gamma)
    all_gather       (p-1) alpha + (p-1)/p n beta
    all_reduce      2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma
"""

from __future__ import annotations

import torch

from minipar.comm.chunks import bounds, check_sizes, chunk_sizes, reduction

SEGMENT_BYTES = (
    1 << 19
)  # a chunk travels in segments of this size, so that adding one hides the next one's journey


def reduce_scatter(
    comm, x: torch.Tensor, op: str = "sum", sizes=None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rank r's chunk of the sum over ranks of x: x [N, ...] -> [sizes[r], ...], cut along dim 0.

    Chunk c starts at rank c+1 and travels once around, growing by one contribution a step, until it ends at rank c.
    Sends all of x but this rank's own chunk: (p-1)/p of it where p divides N. The additions of chunk c run in the order
    c+1, c+2, ..., c. `out`, where to put it, may be that chunk of x itself.
    """
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    flat, edges = _flat(x), _edges(sizes, x)
    own = x.new_empty((sizes[comm.rank], *x.shape[1:])) if out is None else out
    _reduce_scatter_into(comm, flat, own.view(-1), edges, reduction(op, x.dtype))
    return own


def all_gather(comm, x: torch.Tensor, sizes=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every rank's x, concatenated along dim 0: x [sizes[r], ...] -> [sum(sizes), ...]; without `sizes`, all are alike.

    In each step pass on the chunk received in the one before. Sends every chunk but the right neighbour's: (p-1)/p of
    the result where all are alike. `out`, where to put it, may have x in its place already: then nothing is copied.
    """
    sizes = gathered_sizes(comm, x, sizes)
    out, edges = x.new_empty((sum(sizes), *x.shape[1:])) if out is None else out, _edges(sizes, x)
    flat = out.view(-1)
    _put(x, flat[edges[comm.rank] : edges[comm.rank + 1]])
    _all_gather_in(comm, flat, edges)
    return out


def all_reduce(comm, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over ranks of x, on every rank: a reduce-scatter, then an all-gather. Bitwise the same on all ranks.

    Sends 2(p-1)/p of x where p divides its length; else all of it twice, less chunk r and chunk r+1 (mod p), cut as
    torch.chunk cuts. `out` may be x itself: then it is in place.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    flat, target = _flat(x), out.view(-1)
    edges = bounds(chunk_sizes(flat.numel(), comm.size))
    own = target[edges[comm.rank] : edges[comm.rank + 1]]
    _reduce_scatter_into(comm, flat, own, edges, reduction(op, x.dtype))
    _all_gather_in(comm, target, edges)
    return out


def broadcast(comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The root's x on every rank, for long vectors: scatter from the root, then a ring all-gather (van de Geijn).

    2(p-1) alpha + 2 (p-1)/p n beta: twice the least number of bytes, but log p / 2 times less than a tree.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat, target = _flat(x), out.view(-1)
    edges = bounds(chunk_sizes(flat.numel(), comm.size))
    if comm.rank == root:
        target.copy_(flat)
        chunks = [(r, flat[edges[r] : edges[r + 1]]) for r in range(comm.size) if r != root]
        for handle in [comm.send(chunk, r, async_op=True) for r, chunk in chunks]:
            handle.wait()
    else:
        own = target[edges[comm.rank] : edges[comm.rank + 1]]
        comm.exchange(None, None, own.shape, own.dtype, root, out=own)
    _all_gather_in(comm, target, edges)
    return out


def reduce(comm, x: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor | None:
    """The sum over ranks of x on the root, None elsewhere: a reduce-scatter, then the chunks go to the root.

    2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma; a rank sends x but its own chunk, then that chunk.
    """
    flat = _flat(x)
    sizes = chunk_sizes(flat.numel(), comm.size)
    own = reduce_scatter(comm, flat, op, sizes)
    if comm.rank != root:
        comm.send(own, root)
        return None
    out, edges = torch.empty_like(flat), bounds(sizes)
    chunks = [out[edges[r] : edges[r + 1]] for r in range(comm.size)]
    chunks[root].copy_(own)
    others = [r for r in range(comm.size) if r != root]
    for handle in [comm.exchange(None, None, None, None, r, out=chunks[r], async_op=True) for r in others]:
        handle.wait()
    return out.view(x.shape)


# The two halves, on flat views ----------------------------------------------------------------------------------


def _reduce_scatter_into(comm, x, own, edges, how) -> None:
    """Sum chunk r of every rank's flat x into `own`, which may be a part of x.

    A segment is passed on as soon as it is summed, while the next one is still arriving. Two scratch buffers take
    turns: one receives while the other is being sent.
    """
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    longest = max(b - a for a, b in zip(edges, edges[1:]))
    scratch = comm.scratch(2 * longest, x.dtype).view(2, longest)
    first = x[edges[left] : edges[left + 1]]
    sends = [comm.send(piece, right, async_op=True) for piece in _segments(first)] if p > 1 else []
    for step in range(1, p):
        c = (rank - 1 - step) % p
        mine = x[edges[c] : edges[c + 1]]
        buffer = scratch[step % 2][: len(mine)]
        arriving = [_receive(comm, piece, left) for piece in _segments(buffer)]
        last = step == p - 1
        passed_on = []
        for handle, here, sum_ in zip(arriving, _segments(mine), _segments(own if last else buffer)):
            how.combine(handle.wait(), here, out=sum_)
            if not last:
                passed_on.append(comm.send(sum_, right, async_op=True))
        for handle in sends:
            handle.wait()
        sends = passed_on
    if p == 1:
        own.copy_(x)
    if how.divide:
        own.div_(p)


def _all_gather_in(comm, flat, edges) -> None:
    """Pass the chunks of `flat` around until every rank has all of them; each rank starts with its own in place."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    chunks = [flat[a:b] for a, b in zip(edges, edges[1:])]
    sends = [comm.send(piece, right, async_op=True) for piece in _segments(chunks[rank])] if p > 1 else []
    for step in range(1, p):
        arriving = [_receive(comm, piece, left) for piece in _segments(chunks[(rank - step) % p])]
        for handle in arriving:
            piece = handle.wait()
            if step < p - 1:
                sends.append(comm.send(piece, right, async_op=True))
    for handle in sends:
        handle.wait()


def _receive(comm, out, source):
    return comm.exchange(None, None, out.shape, out.dtype, source, out=out, async_op=True)


def _put(x: torch.Tensor, place: torch.Tensor) -> None:
    """Copy x to its place, unless that is where it is."""
    if x.data_ptr() != place.data_ptr():
        place.copy_(_flat(x))


def _segments(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split(max(1, SEGMENT_BYTES // flat.element_size())) if flat.numel() else ()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1)


def _edges(sizes, x: torch.Tensor) -> list[int]:
    return [edge * x.shape[1:].numel() for edge in bounds(sizes)]


def gathered_sizes(comm, x: torch.Tensor, sizes) -> list[int]:
    """The lengths along dim 0 of what each rank brings to an all-gather."""
    sizes = [x.shape[0]] * comm.size if sizes is None else [int(s) for s in sizes]
    if len(sizes) != comm.size or sizes[comm.rank] != x.shape[0]:
        raise ValueError(
            f"sizes={sizes} must name {comm.size} lengths, x's {x.shape[0]} at place {comm.rank}"
        )
    return sizes
