"""Collectives built from point-to-point messages. All p ranks make the same call; only all_reduce_ writes to its input.

In a ring, rank r sends to its right neighbour, r+1, and receives from its left, r-1. Reduce-scatter with p = 4: the sum of
chunk 0 starts on rank 1 and goes around the ring, so it is complete on rank 0. Likewise, chunk r is complete on rank r.

               rank 0      rank 1      rank 2      rank 3
    step 1     sends c3    sends c0    sends c1    sends c2      each adds its own part to the chunk that arrives
    step 2     sends c2    sends c3    sends c0    sends c1      c2 is the sum of ranks 3 and 0 by now
    step 3     sends c1    sends c2    sends c3    sends c0      then rank 0 has all of c0, rank 1 all of c1, ...

Each rank sends, for n elements in the whole vector:

    reduce_scatter, all_gather, all_to_all   (p-1)/p n
    all_reduce                              2(p-1)/p n
    broadcast                                n per message: ceil(log2 p) messages from the root, p-1 in all

In the library: minipar/comm/ring.py, tree.py, pairwise.py, which add segments, other algorithms, a tensor for the result.
"""

import torch


def cut(x, p):
    """Split x into p chunks along dim 0, as torch.chunk does, but with empty chunks where it would return fewer."""
    size = -(-len(x) // p)
    return [x[i * size : (i + 1) * size] for i in range(p)]


def reduce_scatter(comm, x, combine=torch.add):
    """Sum x over ranks; rank r keeps chunk r of the sum.   x [N, ...] -> [N/p, ...]"""
    p, r = comm.size, comm.rank
    left, right = (r - 1) % p, (r + 1) % p
    chunks = [chunk.clone() for chunk in cut(x, p)]
    for step in range(1, p):
        ready = chunks[(r - step) % p]
        mine = (r - step - 1) % p
        arrived = comm.exchange(ready, right, chunks[mine].shape, x.dtype, left)
        chunks[mine] = combine(chunks[mine], arrived)
    return chunks[r]


def all_gather(comm, chunk, sizes=None):
    """Concatenate all ranks' chunks, everywhere.   chunk [n, ...] -> [p n, ...]   sizes: each rank's n; None: equal"""
    p, r = comm.size, comm.rank
    left, right = (r - 1) % p, (r + 1) % p
    sizes = sizes or [len(chunk)] * p
    chunks = [chunk] * p  # the other ranks' chunks replace the copies
    for step in range(p - 1):
        newest = chunks[(r - step) % p]  # first its own chunk, then the one received last
        source = (r - step - 1) % p
        shape = (sizes[source], *chunk.shape[1:])
        chunks[source] = comm.exchange(newest, right, shape, chunk.dtype, left)
    return torch.cat(chunks)


def all_reduce(comm, x, combine=torch.add):
    """Sum x over ranks, on every rank: a reduce-scatter, then an all-gather of the complete chunks."""
    flat = x.flatten()
    sizes = [len(chunk) for chunk in cut(flat, comm.size)]
    return all_gather(comm, reduce_scatter(comm, flat, combine), sizes).view_as(x)


def all_reduce_(comm, x):
    """Write the same sum into x, which must be contiguous. Needs memory for one received chunk."""
    p, r = comm.size, comm.rank
    left, right = (r - 1) % p, (r + 1) % p
    chunks = cut(x.view(-1), p)  # views: writing to a chunk writes to x
    for step in range(1, p):  # reduce-scatter: chunk r ends complete on rank r
        mine = chunks[(r - step - 1) % p]
        mine += comm.exchange(chunks[(r - step) % p], right, mine.shape, x.dtype, left)
    for step in range(p - 1):  # all-gather: rank r first sends chunk r
        other = chunks[(r - step - 1) % p]
        other.copy_(comm.exchange(chunks[(r - step) % p], right, other.shape, x.dtype, left))
    return x


def broadcast(comm, x, root=0):
    """Copy the root's x to every rank by a binomial tree. The other ranks' x gives only the shape and the dtype.

    p = 8, from root 0:    0 -> 4,    then 0 -> 2, 4 -> 6,    then 0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
    """
    p = comm.size
    place = (comm.rank - root) % p  # the rank, counted from the root
    has_it = place == 0
    for i in reversed(range((p - 1).bit_length())):  # each step doubles the number of ranks that have x
        distance = 2**i
        if has_it and place + distance < p:
            comm.send(x, (comm.rank + distance) % p)
        elif not has_it and place % distance == 0:
            x = comm.recv(x.shape, x.dtype, (comm.rank - distance) % p)
            has_it = True
    return x.clone()


def all_to_all(comm, x, send_sizes, recv_sizes):
    """Send chunk s of x to rank s; chunk s of the result is from rank s.   [sum(send), ...] -> [sum(recv), ...]"""
    p, r = comm.size, comm.rank
    sent = x.split(send_sizes)
    received = list(sent)  # keeps this rank's own chunk; received chunks replace the rest
    for step in range(1, p):  # in each step every rank sends one chunk and receives one
        to, source = (r + step) % p, (r - step) % p
        shape = (recv_sizes[source], *x.shape[1:])
        received[source] = comm.exchange(sent[to], to, shape, x.dtype, source)
    return torch.cat(received)
