"""Bruck's all-to-all: ceil(log2 p) messages instead of p-1, for short vectors; a chunk travels in up to log p of them.

On every rank, block i is the chunk that has to travel i ranks to the right. In the round of distance k = 1, 2, 4, ... each
rank sends all blocks i with bit k set, in one message, to the rank k to the right: i is the sum of its bits.

Costs, n bytes in x, equal chunks, p a power of two: lg p alpha + lg p n/2 beta. Pairwise sends (p-1)/p n in p-1 messages,
so Bruck pays where n is below about 2 p alpha / (beta lg p). In general block i is sent as often as i has bits set.

Where ranks give recv_sizes, a rank cannot know the lengths of the blocks that pass through it: in each round it first
receives them, 8 bytes a block ("two-phase Bruck"). Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997, section 3; Thakur
et al. 2005, section 4.6; for unequal chunks Fan et al. 2022.
"""

from __future__ import annotations

import torch

from minipar.comm.pairwise import all_to_all_sizes


def all_to_all(comm, x: torch.Tensor, send_sizes=None, recv_sizes=None) -> torch.Tensor:
    """Transpose the chunks along dim 0, as `pairwise.all_to_all` does. All ranks give recv_sizes, or none does.

    Sends, in the round of distance k, the blocks i with bit k set: rank r's block i is then the chunk of rank r - i mod k
    for the rank i to the right of that. With recv_sizes, also 8 bytes for each block.
    """
    p, rank = comm.size, comm.rank
    lengths_travel = recv_sizes is not None
    send_sizes, recv_sizes = all_to_all_sizes(comm, x, send_sizes, recv_sizes)
    chunks = x.detach().split(send_sizes)
    blocks = [chunks[(rank + i) % p] for i in range(p)]
    distance = 1
    while distance < p:
        moving = [i for i in range(p) if i & distance]
        to, source = (rank + distance) % p, (rank - distance) % p
        if lengths_travel:
            mine = torch.tensor([len(blocks[i]) for i in moving], device=x.device)
            lengths = comm.exchange(mine, to, mine.shape, mine.dtype, source).tolist()
        else:  # the size of a chunk depends on where it goes
            lengths = [send_sizes[(source - i % distance + i) % p] for i in moving]
        packed = torch.cat([blocks[i] for i in moving])
        received = comm.exchange(packed, to, (sum(lengths), *x.shape[1:]), x.dtype, source)
        for i, block in zip(moving, received.split(lengths)):
            blocks[i] = block
        distance *= 2
    return torch.cat([blocks[(rank - source) % p] for source in range(p)])
