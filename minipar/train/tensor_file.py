"""Safetensors files in parts: read slices of their tensors, and write tensors that are never all in memory.

    8 bytes, the header's length | header: JSON, {name: {dtype, shape, data_offsets}} | the tensors' bytes, row-major

The library reads and writes whole files. A checkpoint's reader needs slices, and an export has no room for the whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
BLOCK_BYTES = 1 << 20


class TensorFile:
    """A safetensors file opened for reading slices. Between calls it holds no file open, only the header."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def header_bytes(self) -> bytes:
        """The header with its length, as stored. Raises ValueError where the file ends before it does."""
        with self.path.open("rb") as file:
            length = file.read(8)
            size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
            if not 0 < size <= self.path.stat().st_size - 8:
                raise ValueError(f"its header of {size} bytes is not in the file")
            return length + file.read(size)

    @cached_property
    def _header(self) -> dict:
        return json.loads(self.header_bytes[8:])

    def __contains__(self, key: str) -> bool:
        return key in self._header

    def dtype(self, key: str) -> torch.dtype:
        return DTYPES[self._header[key]["dtype"]]

    def blocks(self, key: str) -> Iterator[bytes]:
        """Yield a tensor's bytes, a block at a time."""
        start, stop = self._header[key]["data_offsets"]
        with self.path.open("rb") as file:
            file.seek(len(self.header_bytes) + start)
            while start < stop and (block := file.read(min(BLOCK_BYTES, stop - start))):
                start += len(block)
                yield block

    def read(self, key: str, shape, start, length, offset: int = 0) -> torch.Tensor:
        """Return the box at `start` of `length` from a tensor, seen as row-major [shape] from its element `offset` on.

        Reads the bytes of the box alone, each run of adjacent elements at once. Raises ValueError where they end early.
        """
        box = torch.empty(tuple(length), dtype=self.dtype(key))
        to, itemsize, done = memoryview(raw_bytes(box)), box.itemsize, 0
        base = len(self.header_bytes) + self._header[key]["data_offsets"][0]
        with self.path.open("rb", buffering=0) as file:  # a buffer would read on past each run
            for first, count in _runs(shape, start, length):
                file.seek(base + (offset + first) * itemsize)
                stop = done + count * itemsize
                while done < stop:
                    got = file.readinto(to[done:stop])
                    if not got:
                        raise ValueError(f"{self.path} ends inside {key}")
                    done += got
        return box


def _runs(shape, start, length) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of each contiguous run of a box in a row-major tensor, in order."""
    dim = len(shape)
    while dim and length[dim - 1] == shape[dim - 1]:
        dim -= 1
    outer, inner = (
        max(dim - 1, 0),
        prod(shape[dim:]),
    )  # dims [0, outer) are stepped through, those from `dim` on are whole
    count = inner * length[outer] if dim else inner
    if not prod(length):
        return
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    within = start[outer] * inner if dim else 0
    for index in product(*(range(start[d], start[d] + length[d]) for d in range(outer))):
        yield sum(i * stride for i, stride in zip(index, strides)) + within, count


def raw_bytes(x: torch.Tensor):
    """The bytes of a contiguous CPU tensor, as an array that shares its memory."""
    return x.detach().reshape(-1).view(torch.uint8).numpy()


class Streamed(NamedTuple):
    """A tensor to be written: `make` is called when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write_streamed(file: BinaryIO, tensors: Iterable[Streamed], metadata: dict[str, str]) -> None:
    """Write a safetensors file; of its tensors one at a time is in memory."""
    tensors, names = list(tensors), {dtype: name for name, dtype in DTYPES.items()}
    header, at = {"__metadata__": metadata}, 0
    for x in tensors:
        end = at + prod(x.shape) * x.dtype.itemsize
        header[x.name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    file.write(struct.pack("<Q", len(text)) + text)
    for x in tensors:
        file.write(raw_bytes(x.make().contiguous()))
