"""Blocks of the KV cache whose keys and values are quantized to 8, 4 or 2 bits when they are full.

The elements of a group are stored as small integers, and dequantized with the group's min and step:

    step = (max - min) / (2^bits - 1)       code = round((x - min) / step)       x' = min + step code

So |x' - x| is at most half a step, plus the rounding of min and step to 16 bits. The groups are:

    values   by token: g features of a head of one token
    keys     by channel: one feature of a head over the b tokens of a block. Some features of keys are large in every
             token; they would enlarge the step of every other feature in their group

Including min and step, an element takes

    bits + 32 / g  bits        values: 4.5 for 4 bits in groups of 64, so they shrink 3.6 times from bfloat16, not 4 times
    bits + 32 / b  bits        keys: the more tokens a block has, the fewer bits

The most recent tokens matter most, and keys need a whole group of tokens. So the last block of a text stays unquantized
until it is full:

    token t attends to    tokens 0 ... b (t // b) - 1 quantized    |    tokens b (t // b) ... t unquantized

The keys and values of a token's attention depend only on t, b and the request's own text. So the text is the same in every
batch, for every division of the prompt, after every preemption and on every mesh; only another block size changes it.
These cases need care:

    a prompt in pieces         a block filled by a piece is quantized for the piece's queries after the block, but not for
                               the queries in the block (`views`)
    a wrong draft token        a block is quantized for good when its tokens are final (`settle`), not when it is full
    swapping                   unquantized tokens move with their block
    recomputation              begins at the first token of a block
    a cached prefix            prefill resumes at the first token of a block, so the block of a text's last token is never
                               shared (scheduler.py)

On a small trained model, quantized to 2 bits in blocks of 16, leaving the last block unquantized divides the KL divergence
of the next token's distribution by 6, and quantizing keys by channel divides it by another 1.4.

Source: KIVI, arXiv:2402.02750, section 3. There, attention over a prompt uses unquantized keys and values, which are
quantized afterwards, so a text depends on where its prompt ends; and a window of 32 or 128 tokens stays unquantized, where
here one block does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.inference.blocks import BlockMemory, BlockPool
from minipar.support.errors import one_of, require_divides

BITS = (8, 4, 2)


def element_bits(bits: int, group: int) -> float:
    """Return the bits that an element takes, including its share of min and step: bits + 32 / g."""
    return bits + 32 / group


def round_along(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize x in groups that lie along `dim`.

    codes    as x, uint8
    extents  as x without `dim`, [..., 2] float16: min and step of each group
    """
    x = x.double()
    least, most = x.amin(dim), x.amax(dim)
    extents = torch.stack((least, (most - least) / (2**bits - 1)), -1).half()
    least, step = (extent.unsqueeze(dim) for extent in extents.double().unbind(-1))
    steps = torch.where(step == 0, 0.0, (x - least) / step)
    return steps.round().clamp(0, 2**bits - 1).to(torch.uint8), extents


def restore_along(codes: Tensor, extents: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `round_along`."""
    least, step = (extent.unsqueeze(dim) for extent in extents.double().unbind(-1))
    return (least + step * codes).to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put 8 / bits codes into each byte, the first in the lowest bits: [..., d] -> [..., d * bits / 8]."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (codes.unflatten(-1, (-1, 8 // bits)) << places).sum(-1).to(torch.uint8)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` put into bytes."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = ((packed[..., None] >> places) & (2**bits - 1)).flatten(-2)
    return codes


def round_values(v: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Quantize values by token, in groups of features.

    v        [..., d]
    codes    [..., d * bits / 8] uint8
    extents  [..., d / g, 2] float16
    """
    codes, extents = round_along(v.unflatten(-1, (-1, group)), -1, bits)
    return pack(codes.flatten(-2), bits), extents


def restore_values(codes: Tensor, extents: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `round_values`."""
    groups = unpack(codes, bits).unflatten(-1, (extents.shape[-2], -1))
    return restore_along(groups, extents, -1, dtype).flatten(-2)


def round_keys(k: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize the keys of a block by channel.

    k        [..., b, h_kv, d]
    codes    [..., b, h_kv, d * bits / 8] uint8
    extents  [..., h_kv, d, 2] float16
    """
    codes, extents = round_along(k, -3, bits)
    return pack(codes, bits), extents


def restore_keys(codes: Tensor, extents: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `round_keys`."""
    return restore_along(unpack(codes, bits), extents, -3, dtype)


class QuantizedBlockMemory(BlockMemory):
    """A `BlockMemory` in which the keys and values of full blocks are quantized.

    codes          [2, num_blocks, b, h_kv, d * bits / 8] uint8        keys, then values
    key_extents    [1, num_blocks, h_kv, d, 2] float16
    value_extents  [1, num_blocks, b, h_kv, d / g, 2] float16
    whole          block -> [2, b, h_kv, d], unquantized, for the blocks that are not settled

    After a step, one block per request is unquantized; during a step, so are the blocks of its new tokens.
    """

    def __init__(
        self, pool: BlockPool, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
        bits: int, group: int,
    ):  # fmt: skip
        blocks, b, h, d = pool.num_blocks, pool.block_size, num_kv_heads, head_dim
        self.pool, self.bits, self.group, self.dtype = pool, bits, group, dtype
        self.block_shape = 2, b, h, d
        halves = partial(torch.zeros, dtype=torch.float16, device=device)
        self.codes = torch.zeros(2, blocks, b, h, d * bits // 8, dtype=torch.uint8, device=device)
        self.key_extents = halves(1, blocks, h, d, 2)
        self.value_extents = halves(1, blocks, b, h, d // group, 2)
        self.tensors = self.codes, self.key_extents, self.value_extents
        self.whole: dict[int, Tensor] = {}

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        blocks, places = slots // self.pool.block_size, slots % self.pool.block_size
        both = torch.stack((k, v))
        for block in blocks.unique().tolist():
            if block not in self.whole:
                self.whole[block] = both.new_zeros(self.block_shape)
            own = blocks == block
            self.whole[block][:, places[own]] = both[:, own]

    def views(self, table: Tensor, begin: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield what the tokens of each block attend to: earlier blocks quantized, and the block itself unquantized."""
        b, blocks = self.pool.block_size, table.tolist()
        last = (end - 1) // b
        for block in blocks[:last]:
            if block in self.whole:
                self._round(block)
        rounded = self._restore(table[:last])
        for i in range(begin // b, last + 1):
            stop = min(end, (i + 1) * b)
            own = self.whole[blocks[i]][:, : stop - i * b]
            keys, values = torch.cat((rounded[:, : i * b], own), 1).transpose(1, 2).unsqueeze(1)
            yield stop, keys, values

    def read(self, table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of a request's first tokens, as the last of these tokens attends to them."""
        ((_, keys, values),) = self.views(table, num_tokens - 1, num_tokens)
        return keys, values

    def settle(self, table: Sequence[int], num_tokens: int) -> None:
        for block in table[: num_tokens // self.pool.block_size]:
            if block in self.whole:
                self._round(block)
                del self.whole[block]
        for block in [block for block in self.whole if self.pool.holders[block] == 0]:
            del self.whole[block]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(x.nbytes for x in self.whole.values())

    def copy(self, source: int, destination: int) -> None:
        raise AssertionError("the block of a text's last token, which is written to, is never shared")

    def save(self, table: Tensor) -> list[Tensor]:
        places = [i for i, block in enumerate(table.tolist()) if block in self.whole]
        whole = [self.whole[int(table[i])].to("cpu", copy=True) for i in places]
        return [*super().save(table), torch.tensor(places), *whole]

    def load(self, table: Tensor, saved: list[Tensor]) -> None:
        rounded, (places, *whole) = saved[: len(self.tensors)], saved[len(self.tensors) :]
        super().load(table, rounded)
        blocks = table.tolist()
        for block in blocks:
            self.whole.pop(block, None)
        for i, x in zip(places.tolist(), whole, strict=True):
            self.whole[blocks[i]] = x.to(table.device, copy=True)

    def _round(self, block: int) -> None:
        k, v = self.whole[block]
        self.codes[0, block], self.key_extents[0, block] = round_keys(k, self.bits)
        self.codes[1, block], self.value_extents[0, block] = round_values(v, self.bits, self.group)

    def _restore(self, table: Tensor) -> Tensor:
        """Return the dequantized keys and values of these blocks, [2, blocks * b, h_kv, d]."""
        (key_codes, value_codes), how = self.codes[:, table], (self.bits, self.dtype)
        keys = restore_keys(key_codes, self.key_extents[0, table], *how)
        values = restore_values(value_codes, self.value_extents[0, table], *how)
        return torch.stack((keys, values)).flatten(1, 2)


def check_quantization(config: ModelConfig, bits: int, group: int) -> None:
    """Raise ValueError if the keys and values of this model cannot be divided into such groups."""
    if config.kv_latent_dim:
        raise ValueError(
            f"cache_bits={bits} with kv_latent_dim={config.kv_latent_dim}: keys and values are rounded, latents are not; "
            f"leave cache_bits out"
        )
    if bits not in BITS:
        raise ValueError(f"cache_bits={bits}; use {one_of(BITS)}")
    require_divides("cache_group", group, "head_dim", config.head_dim)
    if group * bits % 8:
        raise ValueError(
            f"cache_group={group} elements of {bits} bits are no whole bytes; use a multiple of {8 // bits}"
        )
