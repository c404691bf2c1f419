"""Bruck's all-to-all for short vectors: ceil(log2 p) messages instead of p-1, but a chunk may be sent several times.

On every rank, block i is the chunk that must move i ranks to the right. There is one round for each distance k = 1, 2, 4,
... below p. In it, each rank sends the blocks i with bit k of i set, in one message, to the rank k to its right. Over all
rounds, block i moves i ranks, the sum of the distances of its set bits.

Costs, n bytes in x, equal chunks, p a power of two: lg p alpha + lg p n/2 beta. Pairwise sends (p-1)/p n in p-1 messages,
so Bruck is faster if n is below about 2 p alpha / (beta lg p). Block i is sent once for each bit set in i.

With recv_sizes, a rank does not know the lengths of the blocks that pass through it: each round first sends them, 8 bytes
a block ("two-phase Bruck"). Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997, section 3; Thakur
et al. 2005, section 4.6; for unequal chunks Fan et al. 2022.
"""

from __future__ import annotations

import torch

from minipar.comm.pairwise import all_to_all_sizes
from minipar.comm.point_to_point import PointToPoint, Sizes


def all_to_all(
    comm: PointToPoint, x: torch.Tensor, send_sizes: Sizes = None, recv_sizes: Sizes = None
) -> torch.Tensor:
    """Transpose the chunks along dim 0, as `pairwise.all_to_all` does. Either all ranks pass recv_sizes, or none does.

    In round k = 1, 2, 4, ..., a rank sends the blocks i with bit k set. Before that round, block i of rank r is a chunk
    that started on rank s = r - (i mod k), and its destination is rank s + i. With recv_sizes, a rank also sends 8 bytes
    for each block.
    """
    p, rank = comm.size, comm.rank
    lengths_travel = recv_sizes is not None
    send_sizes, recv_sizes = all_to_all_sizes(comm, x, send_sizes, recv_sizes)
    chunks = torch.split(x.detach(), send_sizes)
    blocks = [chunks[(rank + i) % p] for i in range(p)]
    distance = 1
    while distance < p:
        moving = [i for i in range(p) if i & distance]
        to, source = (rank + distance) % p, (rank - distance) % p
        if lengths_travel:
            mine = torch.tensor([len(blocks[i]) for i in moving], device=x.device)
            lengths = comm.exchange(mine, to, mine.shape, mine.dtype, source).tolist()
        else:  # a chunk's size depends only on its destination, so this rank knows the lengths
            lengths = [send_sizes[(source - i % distance + i) % p] for i in moving]
        packed = torch.cat([blocks[i] for i in moving])
        received = comm.exchange(packed, to, (sum(lengths), *x.shape[1:]), x.dtype, source)
        for i, block in zip(moving, torch.split(received, lengths)):
            blocks[i] = block
        distance *= 2
    return torch.cat([blocks[(rank - source) % p] for source in range(p)])


ALGORITHM = {"all_to_all": all_to_all}  # what `--algorithm bruck` loads
