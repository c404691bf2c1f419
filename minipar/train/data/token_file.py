"""A file of token ids, mapped into memory, so that a run can train on a file larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = ("uint8", "uint16", "uint32")
PIECE = 1 << 22  # number of ids read at a time


class TokenFile:
    """The ids of a file as a sequence. Index it by a slice or a tensor of positions; the result is an int64 tensor.

    Only the pages that are indexed are read from the mapped file, and all ranks of a machine share them. When the object is
    sent to a rank, only the path is sent, and the rank maps the file itself.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], first_byte: int, count: int):
        self.path = path.resolve()
        self._layout = dtype, first_byte, count

    @cached_property
    def array(self) -> Array:
        dtype, first_byte, count = self._layout
        return np.asarray(np.memmap(self.path, dtype, "r", first_byte, (count,)))

    def __len__(self) -> int:
        return self._layout[2]

    def __getitem__(self, places: slice | torch.Tensor) -> torch.Tensor:
        index = places.numpy() if isinstance(places, torch.Tensor) else places
        return torch.from_numpy(self.array[index].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "array"}


def open_bytes(path: Path) -> TokenFile:
    """Open a file whose bytes are the tokens. Raises ValueError if it cannot be read, or is empty."""
    return _opened("text", path, np.dtype("uint8"), 0)


def open_tokens(path: Path, vocab_size: int) -> TokenFile:
    """Open a one-dimensional .npy file of unsigned integers, or a headerless file of ids in the machine's byte order.

    Ids in a headerless file have 16 bits, or 32 if `vocab_size` exceeds 65536.
    Raises ValueError if the file cannot be read, is empty, or has other contents.
    """
    if path.suffix != ".npy":
        return _opened("tokens", path, np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32"), 0)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or f"no .npy file: {error}"
        raise ValueError(f"tokens={path}: {reason}; give a readable file") from None
    if array.ndim != 1 or array.dtype not in [np.dtype(name) for name in DTYPES]:
        raise ValueError(
            f"tokens={path} is an array {list(array.shape)} of {array.dtype}; "
            "use one dimension of uint8, uint16 or uint32"
        )
    return _opened("tokens", path, array.dtype, array.offset)


def _opened(name: str, path: Path, dtype: np.dtype[Any], first_byte: int) -> TokenFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2) - first_byte
    except OSError as error:
        raise ValueError(f"{name}={path}: {error.strerror}; give a readable file") from None
    if not size:
        raise ValueError(f"{name}={path} is empty; give a file with more than one sample of text")
    if size % dtype.itemsize:
        raise ValueError(
            f"{name}={path} has {size} bytes, no whole number of {dtype} ids; a .npy file says its own dtype"
        )
    return TokenFile(path, dtype, first_byte, size // dtype.itemsize)


def pieces_of(text: torch.Tensor | TokenFile) -> Iterator[Array]:
    """Yield the ids of a tensor or a TokenFile in consecutive pieces, uint8 or uint32."""
    array = text.array if isinstance(text, TokenFile) else text.numpy()
    for start in range(0, len(array), PIECE):
        piece = array[start : start + PIECE]
        yield piece if piece.dtype == np.uint8 else piece.astype(np.uint32)
