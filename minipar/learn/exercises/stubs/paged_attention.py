"""A paged KV cache: blocks that are allocated and released, and attention that finds a sequence's tokens by a block table.

    table [7, 2, 5], blocks of 4    tokens 0-3 in block 7, tokens 4-7 in block 2, tokens 8-9 in block 5, slots 0 and 1
    token t of a sequence           in block table[t // size], slot t % size

Checked: every key and value is written to its slot, and nothing else is written; each new token's causal attention,
softmax(q k^T / sqrt(d)) v, over its own sequence so far, in the dtype of the inputs (float64, float32, bfloat16), never
over keys that other sequences have left in a block; releasing a free block raises RuntimeError.
"""


class BlockPool:
    """`num_blocks` blocks, numbered from 0, and which of them are free."""

    def __init__(self, num_blocks, block_size):
        raise NotImplementedError

    def allocate(self):
        """Take a free block and return its number, an int. Raise RuntimeError if none is free."""
        raise NotImplementedError

    def release(self, block):
        """Free a block that was allocated; raise RuntimeError if it is free already."""
        raise NotImplementedError


def paged_attention(memory, size, pieces, q, k, v):
    """Write the new tokens' keys and values to their blocks; return their attention over their own sequence so far.

    memory    [2, number of blocks, size, H, d], keys and values, to be written in place; it may be strided
    size      tokens per block
    pieces    (tokens, begin, table) for each sequence: its new tokens, 0 or more, are its tokens begin, begin + 1, ...;
              tokens 0 ... begin - 1 are already in its blocks. table: a list of ints, with enough blocks or more
    q, k, v   [N, H, 1, d], the rows of all new tokens, one sequence after another
    returns   [N, H, 1, d]
    """
    raise NotImplementedError
