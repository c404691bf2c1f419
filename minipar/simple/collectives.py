"""Collectives built from point-to-point messages. All p ranks make the same call; only all_reduce_ writes to its input.

`comm.exchange(x, to, shape, dtype, source)` sends x to rank `to` and receives a tensor of `shape` from rank `source`.
In a ring, rank r always sends to r+1 and receives from r-1. Each rank sends, for n elements in the whole vector:

    reduce_scatter, all_gather, all_to_all   (p-1)/p n
    all_reduce                              2(p-1)/p n
    broadcast                                n per message: ceil(log2 p) messages from the root, p-1 in all

In the library: minipar/comm/ring.py, tree.py, pairwise.py, which add chunk sizes per rank, segments, other algorithms.
"""

import torch


def cut(x, p):
    """Split x into p chunks along dim 0, as torch.chunk does, but with empty chunks where it would return fewer."""
    size = -(-len(x) // p)
    return [x[i * size : (i + 1) * size] for i in range(p)]


def reduce_scatter(comm, x):
    """Sum x over ranks; rank r keeps chunk r of the sum.   x [N, ...] -> [N/p, ...]"""
    p, r = comm.size, comm.rank
    chunks = [chunk.clone() for chunk in cut(x, p)]
    for step in range(1, p):  # chunk c is sent from rank c+1 around to rank c; each rank adds its own
        ready, next_one = (r - step) % p, (r - step - 1) % p
        like = chunks[next_one]
        chunks[next_one] += comm.exchange(chunks[ready], (r + 1) % p, like.shape, x.dtype, (r - 1) % p)
    return chunks[r]


def all_gather(comm, chunk):
    """Concatenate all ranks' chunks, in rank order, on every rank.   chunk [n, ...] -> [p n, ...]"""
    p, r = comm.size, comm.rank
    chunks = [chunk] * p  # the other ranks' take their places
    for step in range(p - 1):  # pass on the chunk received last; at first, its own
        newest, next_one = (r - step) % p, (r - step - 1) % p
        chunks[next_one] = comm.exchange(chunks[newest], (r + 1) % p, chunk.shape, chunk.dtype, (r - 1) % p)
    return torch.cat(chunks)


def all_reduce(comm, x):
    """Sum x over ranks, on every rank."""
    return all_reduce_(comm, x.clone(memory_format=torch.contiguous_format))


def all_reduce_(comm, x):
    """The same, written into x, which is contiguous: a reduce-scatter, then an all-gather of the complete chunks."""
    chunks = cut(x.view(-1), comm.size)  # views: writing to a chunk writes to x
    p, r, right, left = comm.size, comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(1, p):  # reduce-scatter: chunk r ends complete on rank r
        c = chunks[(r - step - 1) % p]
        c += comm.exchange(chunks[(r - step) % p], right, c.shape, c.dtype, left)
    for step in range(p - 1):  # all-gather: begins with chunk r
        c = chunks[(r - step - 1) % p]
        c.copy_(comm.exchange(chunks[(r - step) % p], right, c.shape, c.dtype, left))
    return x


def broadcast(comm, x, root=0):
    """Copy the root's x to every rank by a binomial tree. The other ranks' x gives only the shape and the dtype."""
    p, place = comm.size, (comm.rank - root) % comm.size  # place: the rank, counted from the root
    have = place == 0
    for distance in [2**i for i in reversed(range((p - 1).bit_length()))]:
        if have and place + distance < p:  # each step doubles the ranks that have x
            comm.send(x, (comm.rank + distance) % p)
        elif not have and place % distance == 0:
            x, have = comm.recv(x.shape, x.dtype, (comm.rank - distance) % p), True
    return x.clone()


def all_to_all(comm, x, send_sizes, recv_sizes):
    """Send chunk s of x to rank s; chunk s of the result is from rank s.   [sum(send), ...] -> [sum(recv), ...]"""
    p, r = comm.size, comm.rank
    sent, received = x.split(send_sizes), list(x.split(send_sizes))  # but for its own, to be replaced
    for step in range(1, p):  # in each step every rank sends one chunk and receives one
        to, source = (r + step) % p, (r - step) % p
        received[source] = comm.exchange(sent[to], to, (recv_sizes[source], *x.shape[1:]), x.dtype, source)
    return torch.cat(received)
