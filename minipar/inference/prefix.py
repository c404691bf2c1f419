"""Prefix cache: full blocks of earlier texts, found by their own tokens and all tokens before them.

The keys and values of a token depend on every token before it. So a block may be reused only if the whole text up to the
block's end is the same. A chain of hashes expresses that in one hash per block:

    key_i = hash(key_{i-1}, tokens of block i)

So two texts with the same block 3 but a different block 0 have different hashes from block 0 on.

The cache counts as one holder of each of its blocks, as a request does. When memory is needed, it gives up the least
recently used of the blocks that only the cache holds. It gives up a text's last blocks first, because a block cannot be
found once its parent is gone.

Source: automatic prefix caching of vLLM; RadixAttention, arXiv:2312.07104, section 3, keeps the same texts in a tree.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from minipar.inference.blocks import BlockPool

ROOT = b""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a block: a hash of its parent's key (ROOT for the first block) and of its own tokens."""
    return hashlib.blake2b(parent + b"," + repr(list(tokens)).encode(), digest_size=16).digest()


def block_keys(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of the full blocks of a text, in order."""
    keys, parent = [], ROOT
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_key(parent, tokens[begin : begin + block_size])
        keys.append(parent)
    return keys


class PrefixCache:
    """Full blocks of earlier texts by hash, the least recently used first."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self._blocks: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached blocks of the longest prefix of this text; the caller is now a holder of each."""
        found = []
        for key in block_keys(tokens, self.pool.block_size):
            if key not in self._blocks:
                break
            found.append(key)
        self._touch(found)
        return [self.pool.share(self._blocks[key]) for key in found]

    def keep(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Add the full blocks of this text. A hash that is in the cache already keeps its block."""
        keys = block_keys(tokens, self.pool.block_size)
        for key, block in zip(keys, table):
            if key not in self._blocks:
                self._blocks[key] = self.pool.share(block)
        self._touch(keys)

    def forget(self, block: int) -> bool:
        """Release this block; return whether it was in the cache."""
        keys = [key for key, kept in self._blocks.items() if kept == block]
        for key in keys:
            self.pool.release(self._blocks.pop(key))
        return bool(keys)

    def evict(self) -> bool:
        """Free the least recently used block that no request holds; return whether there was one."""
        for block in self._blocks.values():
            if self.pool.holders[block] == 1:
                return self.forget(block)
        return False

    def clear(self) -> None:
        while self._blocks:
            self.pool.release(self._blocks.popitem()[1])

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # children first, so that they are evicted before their parent
            self._blocks.move_to_end(key)
