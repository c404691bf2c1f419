"""A paged cache: memory in blocks of a few tokens; each sequence has a table of the blocks that its tokens fill.

    table [7, 2, 5], blocks of 4      tokens 0-3 in block 7, tokens 4-7 in block 2, tokens 8-9 in block 5

How long a sequence will become is not known in advance. If memory is reserved for the longest possible one, most of it
stays unused. A sequence that takes a block only when it needs one wastes less than a block, and may take any free block.

New tokens of many sequences are processed in one pass: N rows of one token each. Everything in the model except attention
processes each row independently. Attention writes the new keys and values to their blocks, then gathers the blocks of each
sequence's table, one sequence after another.

In the library: minipar.inference, blocks.py and paged_model.py, which add blocks that sequences share, and copy on write.
Source: PagedAttention, arXiv:2309.06180, section 4.
"""

from functools import partial

import torch

from .generate import attend, blocks_of, set_cores
from .transformer import HEAD_DIM


class Pool:
    """Blocks of `size` tokens: keys and values [2, number, size, heads, head_dim] for each layer, and a free list."""

    def __init__(self, model, number, size):
        self.size, self.free = size, list(range(number))
        heads = [len(block.q) // HEAD_DIM for block in blocks_of(model)]
        self.memory = [torch.zeros(2, number, size, h, HEAD_DIM, dtype=torch.float64) for h in heads]

    def grow(self, table, num_tokens):
        """Add blocks until the table has room for `num_tokens`; if too few blocks are free, add none and return False."""
        lacking = -(-num_tokens // self.size) - len(table)
        if lacking > len(self.free):
            return False
        table += [self.free.pop() for _ in range(lacking)]
        return True

    def release(self, table):
        self.free += table
        table.clear()


@torch.no_grad()
def read(model, pool, pieces):
    """Process new tokens of several sequences; return the logits of each one's last token, [len(pieces), V/tp].

    pieces   (tokens, begin, table) each: the sequence's tokens from `begin` on; its earlier tokens are in its blocks
    """
    rows = torch.tensor([[token] for tokens, _, _ in pieces for token in tokens])
    set_cores(model, [partial(paged_attention, memory, pool.size, pieces) for memory in pool.memory])
    logits = model(rows)[:, 0]
    set_cores(model, [None] * len(pool.memory))
    return logits[torch.tensor([len(tokens) for tokens, _, _ in pieces]).cumsum(0) - 1]


def paged_attention(memory, size, pieces, q, k, v):
    """Attention of each new token over its own sequence so far.   q, k, v, out [N, heads, 1, head_dim]"""
    outs, row = [], 0
    for tokens, begin, table in pieces:
        rows, end = slice(row, row + len(tokens)), begin + len(tokens)
        for i, t in enumerate(range(begin, end)):
            memory[0, table[t // size], t % size] = k[row + i, :, 0]
            memory[1, table[t // size], t % size] = v[row + i, :, 0]
        keys, values = memory[:, table].flatten(1, 2)[:, :end].transpose(1, 2)  # [heads, end, head_dim] each
        out = attend(q[rows].permute(2, 1, 0, 3), keys[None], values[None])
        outs.append(out.permute(2, 1, 0, 3))
        row += len(tokens)
    return torch.cat(outs)
