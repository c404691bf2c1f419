"""Blocks of the KV cache: which request holds which block, and the memory behind them.

Adds to `simple/paged.py`: blocks that requests share, a count of the holders of each block, other kinds of models.

A contiguous cache reserves memory for the longest text that a request may become. Here memory is cut into blocks of b
tokens, and a request has a table of the blocks that its tokens fill, in order; it takes a block when it needs one:

    token t of the request   is in block table[t // b], at offset t % b

    table [7, 2, 5], b = 4   tokens 0-3 in block 7, tokens 4-7 in block 2, tokens 8-9 in block 5, whose last two are unused

So each request wastes less than one block, and requests whose texts have a common prefix can share its blocks.
A block has a count of holders and becomes free when the last one releases it. A request that must write to a shared block
first copies it.

Source: PagedAttention, arXiv:2309.06180, sections 4.1 to 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.support.errors import require_positive


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that S = `num_tokens` tokens need: ceil(S / b)."""
    return -(-num_tokens // block_size)


def cache_bytes(config: ModelConfig, num_tokens: int, block_size: int, element_bytes: int) -> int:
    """Return the bytes that a request of S tokens holds, in all layers: ceil(S / b) * b * 2 L h_kv d e.

    With latent attention: ceil(S / b) * b * L (c + r) e.
    """
    per_token = config.num_layers * config.cache_elems * element_bytes
    return blocks_for(num_tokens, block_size) * block_size * per_token


class Share(NamedTuple):
    """The part of every text that one of `size` ranks stores: every size-th token; see `split_keys.py`.

    Each rank stores b / size tokens of a block of b tokens. `WHOLE` means that this rank stores all tokens.
    """

    rank: int = 0
    size: int = 1

    def tokens(self, begin: int, end: int) -> range:
        """Return those of the tokens begin, ..., end - 1 of a text that this rank stores."""
        return range(begin + (self.rank - begin) % self.size, end, self.size)

    def slot(self, table: Sequence[int], token: int, block_size: int) -> int:
        """Return the slot of a token that this rank stores: its index among this rank's tokens of all blocks."""
        block, place = divmod(token, block_size)
        return table[block] * (block_size // self.size) + place // self.size


WHOLE = Share()


class BlockPool:
    """A pool of `num_blocks` blocks: which of them are free, and how many holders every other block has.

    Raises ValueError unless both sizes are positive.
    """

    def __init__(self, num_blocks: int, block_size: int):
        require_positive(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.holders = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a free block and return it, now with one holder. Raises RuntimeError if there is none."""
        if not self._free:
            raise RuntimeError(f"all {self.num_blocks} blocks are held; release one first")
        block = self._free.pop()
        self.holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """Add a holder to the block, and return the block. Raises RuntimeError if it is free."""
        self._require_held(block)
        self.holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Remove a holder of the block; without holders it is free. Raises RuntimeError if it is free already."""
        self._require_held(block)
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self._free.append(block)

    def require_writable(self, block: int) -> None:
        """Raise RuntimeError unless the block has exactly one holder, who may write to it."""
        self._require_held(block)
        if self.holders[block] > 1:
            raise RuntimeError(f"block {block} has {self.holders[block]} holders; write to a copy of it")

    def _require_held(self, block: int) -> None:
        if self.holders[block] == 0:
            raise RuntimeError(f"block {block} is free; it was released by its last holder")


class BlockMemory:
    """The keys and values of one attention module, in blocks.

    data     [2, num_blocks, b, h_kv, head_dim]    keys, then values; all heads of a block's tokens are contiguous
             [1, num_blocks, b, 1, c + r]          with `are_same`: a token's latent and its rotated key, which
                                                   `LatentAttention` has as its key and as its value
    tensors  the tensors that hold the blocks: the number of a block is its index in dim 1 of each

    Under tensor parallelism h_kv counts the heads of this rank; the tables are the same on every rank. Every head uses
    every latent, so each rank stores all of them: the cache does not shrink.
    """

    tensors: tuple[Tensor, ...]

    def __init__(
        self, pool: BlockPool, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
        are_same: bool = False,
    ):  # fmt: skip
        # Zeros, not uninitialised memory: `read` gathers the unused end of a block too, before cutting it off.
        shape = 1 if are_same else 2, pool.num_blocks, pool.block_size, num_kv_heads, head_dim
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.tensors = (self.data,)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, [N, h_kv, head_dim], to the tokens' slots, [N] int64: block * b + offset in the block."""
        self.data.flatten(1, 2)[:, slots] = torch.stack((k, v)[: len(self.data)])

    def read_together(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the tokens in these slots, [R, S], of R requests: keys and values, [R, h_kv, S, head_dim]."""
        tokens = self.data.flatten(1, 2)[:, slots].transpose(2, 3)
        return tokens[0], tokens[-1]

    def read(self, table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Gather the first S tokens of a request by its table, [ceil(S / b)]: keys and values, [1, h_kv, S, head_dim]."""
        tokens = self.data[:, table].flatten(1, 2)[:, :num_tokens].transpose(1, 2).unsqueeze(1)
        return tokens[0], tokens[-1]

    def views(self, table: Tensor, begin: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the keys and values that tokens begin ... end - 1 attend to: (end of a range of tokens, keys, values).

        Here these tokens form one range. With quantized blocks, each block of tokens attends to other keys and values.
        """
        yield end, *self.read(table, end)

    def settle(self, table: Sequence[int], num_tokens: int) -> None:
        """Note that the first tokens of a request are final: none of them is a draft that may still be rejected."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    def copy(self, source: int, destination: int) -> None:
        for x in self.tensors:
            x[:, destination] = x[:, source]

    def save(self, table: Tensor) -> list[Tensor]:
        """Return copies of these blocks in CPU memory."""
        return [x[:, table].cpu() for x in self.tensors]

    def load(self, table: Tensor, saved: list[Tensor]) -> None:
        """Write saved blocks to the first blocks of `table`."""
        for x, blocks in zip(self.tensors, saved, strict=True):
            x[:, table[: blocks.shape[1]]] = blocks.to(x.device)


class Rows(NamedTuple):
    """New tokens of one request: tokens begin, begin + 1, ... of its text. All earlier tokens are in the cache."""

    tokens: Sequence[int]
    begin: int
    table: Sequence[int]  # the request's blocks, enough for its last new token
    num_chosen: int = 0  # how many of the last rows have logits from which a token is chosen

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


class Together(NamedTuple):
    """R requests with one new token each, which a forward's attention computes at once.

    rows   [R] the requests' rows among all N
    slots  [R, S] where the tokens of each are stored, filled up with the slot of its own first token: another request's
           nan must not come in, since attention multiplies what it masks by 0
    seen   [R, 1, 1, S] which of them are its tokens
    """

    rows: Tensor
    slots: Tensor
    seen: Tensor

    @classmethod
    def of(cls, places: Sequence[tuple[int, Rows]], block_size: int, device: torch.device) -> Together:
        """Return it for (row, request) pairs."""
        width = max(blocks_for(rows.end, block_size) for _, rows in places)
        # The row, the number of tokens, and the table, in one copy to the device.
        numbers = torch.tensor([
            [row, rows.end, *rows.table[:width], *[0] * (width - len(rows.table))] for row, rows in places
        ]).to(device)  # fmt: skip
        offsets = torch.arange(block_size, device=device)
        slots = (numbers[:, 2:, None] * block_size + offsets).flatten(1)
        seen = torch.arange(slots.shape[1], device=device) < numbers[:, 1:2]
        return cls(numbers[:, 0], torch.where(seen, slots, slots[:, :1]), seen[:, None, None])


class Pass(NamedTuple):
    """The rows of one forward and their slots, computed once for all layers; under cp, only the rows of this rank."""

    requests: Sequence[Rows]
    tokens: Tensor  # [N, 1]
    positions: Tensor  # [N, 1] each row's position in its text
    slots: Tensor  # [N] where its keys and values are stored: block * b + offset in the block
    tables: Mapping[int, Tensor]  # the block table, [ceil(S / b)], of each request that is read by itself
    together: Sequence[Together]  # the others

    @classmethod
    def of(
        cls, requests: Sequence[Rows], block_size: int, device: torch.device, share: Share = WHOLE,
        most_together: int = 0,
    ) -> Pass:  # fmt: skip
        """Return it for these requests. At most `most_together` tokens are gathered at once; 0: none are read together."""
        places = [(rows, t) for rows in requests for t in share.tokens(rows.begin, rows.end)]
        numbers = [
            (rows.tokens[t - rows.begin], t, share.slot(rows.table, t, block_size)) for rows, t in places
        ]
        columns = torch.tensor(numbers, dtype=torch.int64).view(-1, 3).T.contiguous().to(device)
        tokens, positions, slots = columns
        # By the number of requests that fit in one: tables are up to twice as long as another's, which limits the padding.
        groups: dict[int, list[tuple[int, Rows]]] = {}
        tables, first = {}, 0
        for i, rows in enumerate(requests):
            blocks = blocks_for(rows.end, block_size)
            fitting = most_together // (block_size * 2 ** blocks.bit_length())
            if fitting > 0 and len(rows.tokens) == 1:
                groups.setdefault(fitting, []).append((first, rows))
            else:
                tables[i] = torch.tensor(rows.table[:blocks], device=device)
            first += len(rows.tokens)
        together = [
            Together.of(group[i : i + size], block_size, device)
            for size, group in groups.items()
            for i in range(0, len(group), size)
        ]
        return cls(requests, tokens[:, None], positions[:, None], slots, tables, together)
