"""The text as token ids, and the batch of a step: a function of seed and step alone, whatever the mesh.

A text is anything that has a length and can be indexed by a tensor of places: a tensor, a TokenFile, or a Part of one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from minipar.train.epoch import starts_of_step
from minipar.train.token_file import TokenFile, open_bytes, open_tokens, pieces_of
from minipar.train.tokenizer import codec_of, tokens_of_text


class Batch(NamedTuple):
    """All samples of a step: tokens and targets [B, T] int64, and how many targets count."""

    tokens: torch.Tensor
    targets: torch.Tensor
    count: int


class TextId(NamedTuple):
    """By which a checkpoint knows its text: a checksum, how many of its tokens are trained on, and their codec's name."""

    digest: str = ""
    num_tokens: int = 0
    codec: str = "bytes"


NO_TEXT = TextId()


def load_text(path: Path | None) -> torch.Tensor | TokenFile:
    """The bytes of a file, mapped into memory, or of the Python language reference that CPython ships, a uint8 tensor.

    Raises ValueError where the file is missing, not a file, not readable, or empty.
    """
    if path is not None:
        return open_bytes(Path(path))
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def load_data(config) -> tuple[torch.Tensor | TokenFile, str]:
    """The token ids that the run of this TrainConfig trains on, and their checksum. Reads all of them, once.

    Raises ValueError where they cannot be read, are too few for a sample, or the model's vocabulary lacks one of them.
    """
    if config.tokenizer is not None:
        codec = codec_of(config)
        if codec.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"vocab_size={config.model.vocab_size} does not hold the {codec.vocab_size} tokens of "
                f"tokenizer={config.tokenizer}; use {codec.vocab_size} or more"
            )
    if config.tokens is not None:
        text = open_tokens(config.tokens, config.model.vocab_size)
    elif config.tokenizer is not None:
        text = tokens_of_text(config.text, codec)
    else:
        text = load_text(config.text)
    path = config.text if config.tokens is None else config.tokens
    require_samples(text, config.seq_len, path, "text" if config.tokens is None else "tokens")
    return text, digest_of(text, config.model.vocab_size, path)


def require_samples(text, seq_len: int, path: Path | None = None, name: str = "text") -> None:
    """Raise ValueError where the text is shorter than one sample with its targets."""
    if len(text) < seq_len + 1:
        unit = "bytes" if name == "text" else "tokens"
        raise ValueError(
            f"{name}={path} has {len(text)} {unit}, fewer than one sample of seq_len={seq_len} and its last target; "
            f"use seq_len={max(1, len(text) - 1)} or less"
        )


def digest_of(text, vocab_size: int = 1 << 32, path: Path | None = None) -> str:
    """A checksum of the text, by which a checkpoint knows the one it was trained on; the same in any width of its ids.

    Raises ValueError, with its place, for a token outside the vocabulary, and where ids of 32 bits were read as 16.
    """
    digest, place, only_zeros = hashlib.blake2b(digest_size=16), 0, len(text) > 1
    for piece in pieces_of(text):
        only_zeros = only_zeros and not piece[(place + 1) % 2 :: 2].any()
        if int(piece.max()) >= vocab_size:
            wrong = int((piece >= vocab_size).argmax())
            raise ValueError(
                f"tokens={path}: token {piece[wrong]} at place {place + wrong} is outside vocab_size={vocab_size}; "
                "use a larger vocabulary, or the file that was made for this one (a .npy file says its dtype)"
            )
        digest.update(piece)
        place += len(piece)
    if only_zeros and isinstance(text, TokenFile) and text.array.dtype == "uint16":
        raise ValueError(
            f"tokens={path}: every second token is 0, as if ids of 32 bits were read as 16; use a .npy file, which says "
            "its dtype"
        )
    return digest.hexdigest()


# Held-out text -------------------------------------------------------------------------------------------------

HELD_OUT_PIECES = 20


class Part:
    """Some runs [start, stop) of a text as one sequence, without a copy: its places are moved to those of the text."""

    def __init__(self, text, runs: list[tuple[int, int]]):
        starts, stops = torch.tensor(runs).T
        self._text, ends = text, (stops - starts).cumsum(0)
        self._ends, self._moved_by = ends, stops - ends

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: torch.Tensor) -> torch.Tensor:
        return self._text[places + self._moved_by[torch.bucketize(places, self._ends, right=True)]]


def hold_out(text, seq_len: int) -> tuple[Part, Part]:
    """Split the text into (training, held out): a twentieth, at least one sample, is held out, in pieces spread through it.

    The text is cut into up to 20 sections of equal length, fewer where a piece would be shorter than a sample; the end of
    each is held out. So both sides see all of the text, whose parts may be of different difficulty, and share no token.
    Raises ValueError where that leaves too little to train on.
    """
    held = max(len(text) // 20, seq_len + 1)
    if len(text) - held < seq_len + 1:
        raise ValueError(
            f"the text has {len(text)} bytes: too few to hold out a sample of seq_len={seq_len} and train on others; "
            f"use eval_every=0, or seq_len={max(1, len(text) // 2 - 1)} or less"
        )
    pieces = min(HELD_OUT_PIECES, held // (seq_len + 1))
    kept_runs, held_runs, start = [], [], 0
    for i in range(pieces):
        stop = len(text) * (i + 1) // pieces
        middle = stop - (held * (i + 1) // pieces - held * i // pieces)
        kept_runs.append((start, middle))
        held_runs.append((middle, stop))
        start = stop
    return Part(text, kept_runs), Part(text, held_runs)


# Batches -------------------------------------------------------------------------------------------------------


def batch_of_step(
    text, seed: int, step: int, batch_size: int, seq_len: int, sampling: str = "random"
) -> Batch:
    """Draw the samples of a step from (seed, step): every rank can make the whole batch and take its own part.

    sampling  random: each sample begins anywhere in the text, whatever was drawn before
              epoch: the text is cut into samples, and none comes again before all have come (`epoch.py`)
    """
    if sampling == "epoch":
        starts = starts_of_step(len(text), seed, step, batch_size, seq_len)
    else:
        digest = hashlib.blake2b(f"batch {seed} {step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        starts = torch.randint(len(text) - seq_len, (batch_size,), generator=generator)
    samples = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    targets = samples[:, 1:].contiguous()
    return Batch(samples[:, :-1].contiguous(), targets, targets.numel())
