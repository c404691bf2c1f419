"""Codecs encode a vector of n floats in `num_bytes(n)` bytes, and decode it.

A codec is contractive if |x - decode(encode(x))|^2 <= (1 - delta) |x|^2 with delta > 0. Error feedback then converges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.data_parallel.loss_scaler import all_finite
from minipar.model.value_check import assert_async

EIGHT_BITS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Codec(Protocol):
    """The interface of a codec."""

    def num_bytes(self, n: int) -> int: ...

    def encode(self, x: Tensor) -> Tensor: ...

    def decode(self, payload: Tensor, n: int) -> Tensor: ...


@dataclass(frozen=True)
class Sign:
    """One bit per element, packed 8 to a byte, and one float32 scale per block: the block's mean of |x|.

    block  number of elements that share a scale; None: all elements, as in the papers. With short blocks, rows of small
           values, such as those of rare words, get their own small scales

    decode = scale * sign(x), with sign(0) = 1. Contractive, delta = |x|_1^2 / (n |x|_2^2) of the worst block.
    No other scale has a smaller error. 1-bit Adam's scale, |x|_2 / sqrt(n), preserves the norm of x instead. Its error is
    2 |x|_2^2 (1 - |x|_1 / (sqrt(n) |x|_2)), which exceeds |x|_2^2 for sparse x.
    Bytes: ceil(n/8) + 4 ceil(n/block).   Source: EF-SignSGD, arXiv:1901.09847, section 4.
    """

    block: int | None = None

    def num_bytes(self, n: int) -> int:
        return ceil(n / 8) + 4 * (1 if self.block is None else ceil(n / self.block))

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat((pack_bits(x >= 0), _bytes(self._scales(x.abs()).float())))

    def _scales(self, size: Tensor) -> Tensor:
        if self.block is None:
            return size.mean()
        sums = _blocks(size, self.block).sum(1)
        counts = torch.full_like(sums, self.block)
        counts[-1:] -= -len(size) % self.block
        return sums / counts

    def decode(self, payload: Tensor, n: int) -> Tensor:
        split = ceil(n / 8)
        scale = _from_bytes(payload[split:], torch.float32)
        signs = unpack_bits(payload[:split], n).float() * 2 - 1
        return signs * (scale if self.block is None else scale.repeat_interleave(self.block)[:n])


@dataclass(frozen=True)
class EightBits:
    """A value of 8 bits per element, and a float32 scale per block, which maps its largest |x| to the largest value.

    Bytes: n + 4 ceil(n/block).
    """

    kind: str
    block: int = 256

    def num_bytes(self, n: int) -> int:
        return n + 4 * ceil(n / self.block)

    def encode(self, x: Tensor) -> Tensor:
        dtype, blocks = EIGHT_BITS[self.kind], _blocks(x, self.block)
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        scale = blocks.abs().amax(1) / limits.max
        values = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
        codes = (values if dtype.is_floating_point else values.round_()).to(dtype)
        return torch.cat((_bytes(codes.flatten()[: len(x)]), _bytes(scale.float())))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        codes = payload[:n].view(EIGHT_BITS[self.kind]).float()
        scale = _from_bytes(payload[n:], torch.float32)
        return _blocks(codes, self.block).mul_(scale[:, None]).flatten()[:n]


@dataclass(frozen=True)
class Int8(EightBits):
    """Whole numbers up to 127. The error is at most scale / 2."""

    kind: str = field(default="int8", kw_only=True)


@dataclass(frozen=True)
class Float8(EightBits):
    """An fp8 value per element: e4m3 has 4 significant bits and reaches 448, e5m2 has 3 and reaches 57,344."""

    kind: str = "e4m3"


@dataclass(frozen=True)
class TopK:
    """The k = ceil(fraction * n) elements with the largest |x|: their values in `dtype`, and int32 indices.

    delta = k/n. Bytes: 8 k; 12 k in float64.
    """

    fraction: float = 0.01
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: k would be 0, or above n; use above 0, at most 1")

    def k(self, n: int) -> int:
        return min(n, ceil(self.fraction * n))

    def num_bytes(self, n: int) -> int:
        return (4 + self.dtype.itemsize) * self.k(n)

    def encode(self, x: Tensor) -> Tensor:
        index = x.abs().topk(self.k(len(x)), sorted=False).indices
        return torch.cat((_bytes(x[index].to(self.dtype)), _bytes(index.to(torch.int32))))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        split = self.dtype.itemsize * self.k(n)
        index = _from_bytes(payload[split:], torch.int32).long()
        values = _from_bytes(payload[:split], self.dtype)
        return values.new_zeros(n).index_copy_(0, index, values)


CODECS: dict[str, Codec] = {
    "sign": Sign(),
    "int8": Int8(),
    "fp8-e4m3": Float8(),
    "fp8-e5m2": Float8("e5m2"),
    "top-k": TopK(),
}


def require_finite(x: Tensor, what: str) -> None:
    """Raise ArithmeticError if x has nan or inf, since a codec would spread these to other elements or hide them."""
    sentence = f"{what} is not finite: it is not compressed"
    if not assert_async(all_finite(x), sentence):
        raise ArithmeticError(sentence)


def pack_bits(bits: Tensor) -> Tensor:
    """Return bool [n] as uint8 [ceil(n/8)], the first bit lowest."""
    eights = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten()[:n].bool()


def _blocks(x: Tensor, block: int) -> Tensor:
    return F.pad(x, (0, -len(x) % block)).view(-1, block)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    return payload.clone().view(dtype)  # a view in another dtype needs aligned memory, which a clone has
