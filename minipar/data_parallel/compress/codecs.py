"""Codecs: a vector of n floats as few bytes, and back. Each says by formula how many bytes.

A codec is contractive if |x - decode(encode(x))|^2 <= (1 - delta) |x|^2 with delta > 0: then error feedback converges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.errors import one_of

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Sign:
    """One bit per element, packed 8 to a byte, and one float32 scale: the mean of |x|.

    decode = scale * sign(x), with sign(0) = 1. Contractive, delta = |x|_1^2 / (n |x|_2^2).
    Bytes: ceil(n/8) + 4.   Source: EF-SignSGD, arXiv:1901.09847, section 4.
    """

    def num_bytes(self, n: int) -> int:
        return ceil(n / 8) + 4

    def encode(self, x: Tensor) -> Tensor:
        bits = F.pad((x >= 0).to(torch.uint8), (0, -len(x) % 8)).view(-1, 8)
        packed = (bits << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(1, dtype=torch.uint8)
        return torch.cat((packed, _bytes(x.abs().mean().float())))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        packed, scale = payload[:-4], _from_bytes(payload[-4:], torch.float32)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=payload.device) & 1
        return (bits.flatten()[:n].float() * 2 - 1) * scale


@dataclass(frozen=True)
class Int8:
    """8 bits per element and a float32 scale per block: the block's largest |x| over 127. Error at most half a scale.

    Bytes: n + 4 ceil(n/block).
    """

    block: int = 256

    def num_bytes(self, n: int) -> int:
        return n + 4 * ceil(n / self.block)

    def encode(self, x: Tensor) -> Tensor:
        blocks = _blocks(x, self.block)
        scale = blocks.abs().amax(1) / 127
        codes = (blocks / _nonzero(scale)[:, None]).round().to(torch.int8)
        return torch.cat((_bytes(codes.flatten()[: len(x)]), _bytes(scale.float())))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        codes, scale = payload[:n].view(torch.int8).float(), _from_bytes(payload[n:], torch.float32)
        return (_blocks(codes, self.block) * scale[:, None]).flatten()[:n]


@dataclass(frozen=True)
class Float8:
    """fp8 of this kind and a float32 scale per block, so that the block's largest |x| is the format's.

    e4m3 has 4 significant bits and reaches 448, e5m2 has 3 and reaches 57,344. Bytes: n + 4 ceil(n/block).
    """

    kind: str = "e4m3"
    block: int = 256

    def num_bytes(self, n: int) -> int:
        return n + 4 * ceil(n / self.block)

    def encode(self, x: Tensor) -> Tensor:
        dtype, blocks = FLOAT8[self.kind], _blocks(x, self.block)
        scale = blocks.abs().amax(1) / torch.finfo(dtype).max
        codes = (blocks / _nonzero(scale)[:, None]).to(dtype)
        return torch.cat((_bytes(codes.flatten()[: len(x)]), _bytes(scale.float())))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        codes = payload[:n].view(FLOAT8[self.kind]).float()
        scale = _from_bytes(payload[n:], torch.float32)
        return (_blocks(codes, self.block) * scale[:, None]).flatten()[:n]


@dataclass(frozen=True)
class TopK:
    """The k = ceil(fraction * n) elements of largest |x|: their float32 values and int32 indices. delta = k/n.

    Bytes: 8 k.
    """

    fraction: float = 0.01

    def k(self, n: int) -> int:
        return min(n, ceil(self.fraction * n))

    def num_bytes(self, n: int) -> int:
        return 8 * self.k(n)

    def encode(self, x: Tensor) -> Tensor:
        index = x.abs().topk(self.k(len(x)), sorted=False).indices
        return torch.cat((_bytes(x[index].float()), _bytes(index.to(torch.int32))))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        half = len(payload) // 2
        index = _from_bytes(payload[half:], torch.int32).long()
        return payload.new_zeros(n, dtype=torch.float32).index_copy_(
            0, index, _from_bytes(payload[:half], torch.float32)
        )


@dataclass(frozen=True)
class RandomK:
    """k = ceil(fraction * n) elements at places that all ranks draw from `seed`, so that no index is sent. delta = k/n
    on average over seeds.

    Bytes: 4 k. Give each step another seed: `at(step)`.
    """

    fraction: float = 0.01
    seed: int = 0

    def at(self, step: int) -> RandomK:
        return RandomK(self.fraction, self.seed * 1_000_003 + step)

    def k(self, n: int) -> int:
        return min(n, ceil(self.fraction * n))

    def num_bytes(self, n: int) -> int:
        return 4 * self.k(n)

    def _index(self, n: int, device) -> Tensor:
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))[: self.k(n)].to(device)

    def encode(self, x: Tensor) -> Tensor:
        return _bytes(x[self._index(len(x), x.device)].float())

    def decode(self, payload: Tensor, n: int) -> Tensor:
        values = _from_bytes(payload, torch.float32)
        return values.new_zeros(n).index_copy_(0, self._index(n, payload.device), values)


CODECS: dict[str, Callable[[], object]] = {
    "sign": Sign,
    "int8": Int8,
    "fp8-e4m3": Float8,
    "fp8-e5m2": lambda: Float8("e5m2"),
    "top-k": TopK,
    "random-k": RandomK,
}


def make_codec(name: str):
    """Return the codec of this name. Raises ValueError, with the nearest name, if there is none."""
    if name not in CODECS:
        raise ValueError(f"codec={name!r} is unknown; use {one_of(CODECS, near=name)}")
    return CODECS[name]()


def require_finite(x: Tensor, what: str) -> None:
    """Raise ArithmeticError where x has nan or inf: a codec would spread it, or hide it."""
    if not torch.isfinite(x).all():
        raise ArithmeticError(f"{what} is not finite: it is not compressed")


def _blocks(x: Tensor, block: int) -> Tensor:
    return F.pad(x, (0, -len(x) % block)).view(-1, block)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    return payload.clone().view(dtype)  # a copy, since a view needs aligned bytes
