"""Safetensors files, piecewise: read slices of their tensors, and write tensors one at a time.

    8 bytes, the header's length | header: JSON, {name: {dtype, shape, data_offsets}} | the tensors' bytes, row-major

The safetensors library reads and writes whole files. A checkpoint's reader needs slices, and an export has no memory for
all tensors at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
Ints = Sequence[int]
BLOCK_BYTES = 1 << 20


class TensorFile:
    """A safetensors file to read slices from. Between calls it keeps only the header, and no open file."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def header_bytes(self) -> bytes:
        """The header with its length, as stored. Raises ValueError if the file ends before the header does."""
        with self.path.open("rb") as file:
            length = file.read(8)
            size = int.from_bytes(length, "little")
            if not 0 < size <= self.path.stat().st_size - 8:
                raise ValueError(f"its header of {size} bytes is not in the file")
            return length + file.read(size)

    @cached_property
    def _header(self) -> dict[str, Any]:
        header: dict[str, Any] = json.loads(self.header_bytes[8:])
        return header

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

    def read(self, key: str, shape: Ints, start: Ints, length: Ints, offset: int = 0) -> torch.Tensor:
        """Return the box of size `length` at `start`, of a tensor that is read as row-major [shape], beginning at its
        element `offset`.

        Reads only the bytes of the box, each run of adjacent elements at once. Raises ValueError if the file ends early.
        """
        box = torch.empty(tuple(length), dtype=self.dtype(key))
        to, itemsize, done = raw_bytes(box), box.itemsize, 0
        base = len(self.header_bytes) + self._header[key]["data_offsets"][0]
        with self.path.open(
            "rb", buffering=0
        ) as file:  # unbuffered: a buffer would read more than each slice
            for first, count in _runs(shape, start, length):
                file.seek(base + (offset + first) * itemsize)
                stop = done + count * itemsize
                while done < stop:
                    got = file.readinto(to[done:stop])
                    if not got:
                        raise ValueError(f"{self.path} ends inside {key}")
                    done += got
        return box


def _runs(shape: Ints, start: Ints, length: Ints) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of each contiguous run of a box in a row-major tensor, in order."""
    dim = len(shape)
    while dim and length[dim - 1] == shape[dim - 1]:
        dim -= 1
    # Step through dims [0, outer); the box has all of the dims from `dim` on.
    outer, inner = max(dim - 1, 0), prod(shape[dim:])
    count = inner * length[outer] if dim else inner
    if not prod(length):
        return
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    within = start[outer] * inner if dim else 0
    for index in product(*(range(start[d], start[d] + length[d]) for d in range(outer))):
        yield sum(i * stride for i, stride in zip(index, strides)) + within, count


def raw_bytes(x: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; they share its memory."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data


class Streamed(NamedTuple):
    """A tensor to be written: `make` is called when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write_streamed(file: BinaryIO, tensors: Iterable[Streamed], metadata: dict[str, str]) -> None:
    """Write a safetensors file; only one of its tensors is in memory at a time."""
    tensors, names = list(tensors), {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for x in tensors:
        end = at + prod(x.shape) * x.dtype.itemsize
        header[x.name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for x in tensors:
        file.write(raw_bytes(x.make().contiguous()))
