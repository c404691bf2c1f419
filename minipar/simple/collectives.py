"""Collectives from send and receive alone. All p ranks of `comm` make the same call; nobody's input is written to.

In a ring, rank r sends to the right, r+1, and receives from the left, r-1. With n elements in the whole vector, each rank
sends

    reduce_scatter, all_gather, all_to_all   (p-1)/p n
    all_reduce                              2(p-1)/p n
    broadcast                                n for each rank it tells: ceil(log2 p) of them at the root

The library's: minipar/comm/ring.py, tree.py and pairwise.py, plus other sizes per rank, segments, other algorithms.
"""

import torch


def cut(x, p):
    """p chunks of x along dim 0, as torch.chunk cuts, empty ones at the end where it would give fewer."""
    size = -(-len(x) // p)
    return [x[i * size : (i + 1) * size] for i in range(p)]


def reduce_scatter(comm, x):
    """Chunk r of the sum over ranks of x, on rank r.   x [N, ...] -> [N/p, ...]"""
    p, r = comm.size, comm.rank
    chunks = [chunk.clone() for chunk in cut(x, p)]
    for step in range(1, p):
        ready, next_one = (r - step) % p, (r - step - 1) % p
        like = chunks[next_one]
        chunks[next_one] += comm.exchange(chunks[ready], (r + 1) % p, like.shape, x.dtype, (r - 1) % p)
    return chunks[r]


def all_gather(comm, chunk):
    """Every rank's chunk, in rank order, on every rank.   [n, ...] -> [p n, ...]"""
    p, r = comm.size, comm.rank
    chunks = [torch.empty_like(chunk) for _ in range(p)]
    chunks[r] = chunk
    for step in range(p - 1):
        newest, next_one = (r - step) % p, (r - step - 1) % p
        chunks[next_one] = comm.exchange(chunks[newest], (r + 1) % p, chunk.shape, chunk.dtype, (r - 1) % p)
    return torch.cat(chunks)


def all_reduce(comm, x):
    """The sum over ranks of x, on every rank: chunks grow on their way around, then travel once more, complete."""
    p, r = comm.size, comm.rank
    out = x.flatten().clone()
    chunks = cut(out, p)  # views: what is written to a chunk is in `out`
    right, left = (r + 1) % p, (r - 1) % p
    for step in range(1, p):  # reduce-scatter: chunk r ends here
        c = chunks[(r - step - 1) % p]
        c += comm.exchange(chunks[(r - step) % p], right, c.shape, c.dtype, left)
    for step in range(p - 1):  # all-gather: it leaves from here
        c = chunks[(r - step - 1) % p]
        c.copy_(comm.exchange(chunks[(r - step) % p], right, c.shape, c.dtype, left))
    return out.view(x.shape)


def broadcast(comm, x, root=0):
    """The root's x on every rank: in each step, whoever has it tells a rank twice as near as in the one before."""
    p, place = comm.size, (comm.rank - root) % comm.size  # counted from the root
    distance, have = 1 << (p - 1).bit_length(), place == 0
    while distance > 1:
        distance //= 2
        if have and place + distance < p:
            comm.send(x, (comm.rank + distance) % p)
        elif not have and place % distance == 0:
            x, have = comm.recv(x.shape, x.dtype, (comm.rank - distance) % p), True
    return x.clone()


def all_to_all(comm, x, send_sizes, recv_sizes):
    """Chunk s of x goes to rank s; chunk s of the result came from rank s.   [sum(send), ...] -> [sum(recv), ...]"""
    p, r = comm.size, comm.rank
    sent, received = x.split(send_sizes), [None] * p
    received[r] = sent[r]
    for step in range(1, p):  # each pair of ranks meets once
        to, source = (r + step) % p, (r - step) % p
        received[source] = comm.exchange(sent[to], to, (recv_sizes[source], *x.shape[1:]), x.dtype, source)
    return torch.cat(received)
