"""Codecs between text and token ids: bytes, a tokenizer of the package `tokenizers`, or ids written as numbers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import torch

from minipar.config.train_config import TrainConfig
from minipar.support.atomic_files import whole_file

PIECE = 1 << 18  # characters encoded at a time
OVERLAP = 1 << 14  # how many of them are encoded again with the next ones
TOKENIZER = "tokenizer.json"  # the file name of a run's tokenizer, in the run's folder


class Placed(NamedTuple):
    """A token, and the character of the text at which it begins."""

    id: int
    start: int


class Bytes:
    """UTF-8 bytes as tokens. Invalid bytes are decoded as replacement characters."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(min(i, 255) for i in ids).decode(errors="replace")


class Ids:
    """Token ids written as numbers, such as "17 4 256", for a run on a file of tokens without a tokenizer."""

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
    """A tokenizer.json. Raises ValueError if it cannot be read, or the package `tokenizers` is not installed.

    byte_tokens  the tokens that are one byte each, such as <0xE6>, for characters outside the vocabulary
    """

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
        except Exception as error:  # the package raises plain Exceptions
            raise ValueError(f"tokenizer={path} is no tokenizer.json: {error}") from None
        # A tokenizer.json may say that texts are cut to a model's length, or padded to it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.byte_tokens = frozenset(
            i for token, i in vocab.items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        )

    @property
    def digest(self) -> str:
        return digest_of_tokenizer(self.content)

    def encode(self, text: str) -> list[int]:
        return [token.id for token in self.placed(text)]

    def placed(self, text: str) -> list[Placed]:
        """Return the tokens of a text with their places."""
        text.encode()  # raises UnicodeEncodeError, a ValueError, for a text that is no Unicode; the package a TypeError
        # Unlike encode, encode_batch lets other threads run.
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return [Placed(token, start) for token, (start, _) in zip(found.ids, found.offsets)]

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def read_tokenizer(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"tokenizer={path}: {error.strerror}; give a tokenizer.json") from None


def digest_of_tokenizer(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


Codec = Bytes | Ids | Tokenizer


def codec_of_run(folder: Path, extra: dict[str, Any]) -> Codec:
    """Return the codec of the run in `folder`; `extra` is from the run's checkpoint.

    Raises ValueError if the folder does not have the tokenizer with which the run was trained.
    """
    name = extra.get("codec", "bytes")
    if name in ("bytes", "ids"):
        return Bytes() if name == "bytes" else Ids()
    tokenizer = Tokenizer(folder / TOKENIZER)
    if tokenizer.digest != name:
        raise ValueError(f"{folder / TOKENIZER} is not the tokenizer that the run was trained with")
    return tokenizer


def tokenizer_json(folder: Path, extra: dict[str, Any]) -> dict[str, Any] | None:
    """Return the codec of the run in `folder` as a tokenizer.json, for other programs; None for bare token ids.

    It encodes text as the run did: without special tokens, and whatever its length is.
    """
    codec = codec_of_run(folder, extra)
    if isinstance(codec, Ids):
        return None
    if isinstance(codec, Tokenizer):
        return {**json.loads(codec.content), "post_processor": None, "truncation": None, "padding": None}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())}, "merges": [],
        },
    }  # fmt: skip


def _byte_characters() -> list[str]:
    """Return the characters with which a byte-level tokenizer writes the bytes: their own where these are printed."""
    printed = {*range(ord("!"), 127), *range(0xA1, 256)} - {0xAD}
    others = count(256)
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def name_of_codec(config: TrainConfig) -> str:
    """Return the name of the codec in a checkpoint: bytes, ids, or the checksum of a tokenizer.json."""
    if config.tokenizer is not None:
        return digest_of_tokenizer(read_tokenizer(config.tokenizer))
    return "bytes" if config.tokens is None else "ids"


def encoded(path: Path, codec: Tokenizer) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
    """Yield the token ids, uint32, of a file of UTF-8 text, in pieces: those of the whole text encoded at once.

    A token depends on the text around it: a tokenizer may put a space before its input, or a token may span two lines.
    So each piece is encoded together with the end of the piece before it, and begins at a token within that end, around
    which both have the same tokens. Where they have none in common, the two pieces become one.
    About PIECE + OVERLAP characters and their tokens are in memory at a time.
    Raises ValueError if the file cannot be read, or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file, TextIOWrapper(file, encoding="utf-8", newline="") as text:
            piece = _read(path, file, text, PIECE)
            tokens, begin = codec.placed(piece), 0
            while more := _read(path, file, text, max(PIECE, len(piece) - OVERLAP)):
                dropped = max(0, len(piece) - OVERLAP)
                following = piece[dropped:] + more
                next_tokens = codec.placed(following)
                cut = _common_place(tokens, next_tokens, dropped, len(piece) - dropped)
                if cut is None:
                    piece += more
                    tokens = [token for token in codec.placed(piece) if token.start >= begin]
                    continue
                yield _ids(token for token in tokens if token.start < dropped + cut)
                piece, tokens, begin = following, [t for t in next_tokens if t.start >= cut], cut
            if tokens:
                yield _ids(tokens)
    except OSError as error:
        raise ValueError(f"text={path}: {error.strerror}; give a readable file") from None


def _common_place(tokens: list[Placed], following: list[Placed], dropped: int, overlap: int) -> int | None:
    """Return where in the overlap, in characters, both have a token's begin, with the same tokens before and after it.

    dropped   how many characters of the first piece come before the overlap, with which the second piece begins
    Returns None unless the two have the same tokens in the middle half of the overlap, of which the place is the middle.
    """
    first, last = overlap // 4, overlap - overlap // 4
    own = [token._replace(start=token.start - dropped) for token in tokens[-2 * overlap :]]
    own, theirs = ([t for t in some if first <= t.start < last] for some in (own, following[: 2 * overlap]))
    begins = [b.start for a, b in zip(own, own[1:]) if a.start < b.start]
    return begins[len(begins) // 2] if own == theirs and begins else None


def _ids(tokens: Iterable[Placed]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array([token.id for token in tokens], np.uint32)


def _read(path: Path, file: BinaryIO, text: TextIOWrapper, characters: int) -> str:
    try:
        return text.read(characters)
    except UnicodeDecodeError as error:
        # The error counts from the first of the bytes that were being decoded, which are the last that were read.
        place = file.tell() - len(error.object) + error.start
        raise ValueError(f"text={path} is not UTF-8: {error.reason} at byte {place}") from None


def tokens_of_text(path: Path | None, codec: Tokenizer) -> torch.Tensor:
    """Return all token ids of a text, int32, in memory; for a larger text, `minipar tokenize` writes them to a file."""
    if path is None:
        from pydoc_data.topics import topics

        pieces = [np.array(codec.encode("\n".join(topics.values())), np.uint32)]
    else:
        pieces = list(encoded(path, codec))
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
    return torch.from_numpy(ids.astype(np.int32))


def write_tokens(path: Path, codec: Tokenizer, out: Path) -> int:
    """Write a text's token ids to `out`, in the format that `open_tokens` expects of that name; return their number."""
    count, dtype = 0, np.dtype(np.uint16 if codec.vocab_size <= 1 << 16 else np.uint32)
    has_header = out.suffix == ".npy"
    with whole_file(out) as file:
        if has_header:
            _write_header(file, dtype, 0)
        for ids in encoded(path, codec):
            file.write(ids.astype(dtype).tobytes())
            count += len(ids)
        # numpy pads the header, so it has the same length for every count, and can be overwritten.
        if has_header:
            file.seek(0)
            _write_header(file, dtype, count)
    return count


def _write_header(file: IO[bytes], dtype: np.dtype[Any], count: int) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
