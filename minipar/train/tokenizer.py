"""Text to token ids and back: bytes, a tokenizer of the package `tokenizers`, or no more than the ids themselves.

A codec has `encode(text) -> ids`, `decode(ids) -> text` and `vocab_size`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from minipar.train.atomic_files import whole_file

PIECE = 1 << 20  # characters, or a line that is longer
TOKENIZER = "tokenizer.json"  # in the run's folder: what its text was encoded with


class Bytes:
    """UTF-8: a byte is a token. Bytes that are not UTF-8 become replacement characters."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(min(i, 255) for i in ids).decode(errors="replace")


class Ids:
    """Token ids written out: "17 4 256", of a run on a file of tokens without a tokenizer."""

    vocab_size = 0

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"prompt={text!r}: the run has no tokenizer; give token ids, as '17 4 256'"
            ) from None

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Tokenizer:
    """A tokenizer.json. Raises ValueError where it cannot be read, or the package is not installed."""

    def __init__(self, path: Path):
        self.content = read_tokenizer(path)
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                f"tokenizer={path} needs the package tokenizers; pip install 'minipar[tokenizers]'"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self.content.decode())
        except Exception as error:  # the package raises this class itself
            raise ValueError(f"tokenizer={path} is no tokenizer.json: {error}") from None
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def digest(self) -> str:
        return digest_of_tokenizer(self.content)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def read_tokenizer(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"tokenizer={path}: {error.strerror}; give a tokenizer.json") from None


def digest_of_tokenizer(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def codec_of(config) -> Bytes | Ids | Tokenizer:
    """The codec of the run of a TrainConfig."""
    if config.tokenizer is not None:
        return Tokenizer(config.tokenizer)
    return Bytes() if config.tokens is None else Ids()


def codec_of_run(folder: Path, extra: dict) -> Bytes | Ids | Tokenizer:
    """The codec of the run in `folder`, of which a checkpoint says `extra`.

    Raises ValueError where the folder lacks the tokenizer that the run was trained with.
    """
    name = extra.get("codec", "bytes")
    if name in ("bytes", "ids"):
        return Bytes() if name == "bytes" else Ids()
    tokenizer = Tokenizer(folder / TOKENIZER)
    if tokenizer.digest != name:
        raise ValueError(f"{folder / TOKENIZER} is not the tokenizer that the run was trained with")
    return tokenizer


def name_of_codec(config) -> str:
    """The name of the codec in a checkpoint: bytes, ids, or the checksum of a tokenizer.json."""
    if config.tokenizer is not None:
        return digest_of_tokenizer(read_tokenizer(config.tokenizer))
    return "bytes" if config.tokens is None else "ids"


def encoded(path: Path, codec: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids, uint32, of a file of UTF-8 text, in pieces of whole lines: never all of it is in memory.

    No token spans two pieces, and a tokenizer adds none to begin or end a text.
    Raises ValueError where the file cannot be read, or is not UTF-8.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(PIECE):
                yield np.array(codec.encode("".join(lines)), np.uint32)
    except OSError as error:
        raise ValueError(f"text={path}: {error.strerror}; give a readable file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"text={path} is not UTF-8: {error.reason} at byte {error.start}") from None


def tokens_of_text(path: Path | None, codec: Tokenizer) -> torch.Tensor:
    """All token ids of a text, int32, in memory: `minipar tokenize` writes those of a larger one to a file."""
    if path is None:
        from pydoc_data.topics import topics

        pieces = [np.array(codec.encode("\n".join(topics.values())), np.uint32)]
    else:
        pieces = list(encoded(path, codec))
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
    return torch.from_numpy(ids.astype(np.int32))


def write_tokens(path: Path, codec: Tokenizer, out: Path) -> int:
    """Write a text's token ids to `out`, in the width that `token_file.open_tokens` expects; return how many there are."""
    count, dtype = 0, np.uint16 if codec.vocab_size <= 1 << 16 else np.uint32
    with whole_file(out) as file:
        for ids in encoded(path, codec):
            file.write(ids.astype(dtype).tobytes())
            count += len(ids)
    return count
