"""The text as bytes, and the batch of a step: a function of seed and step alone, whatever the mesh."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """All samples of a step: tokens and targets [B, T] int64, and how many targets count."""

    tokens: torch.Tensor
    targets: torch.Tensor
    count: int


def load_text(path: Path | None) -> torch.Tensor:
    """The bytes of a file, or of the Python language reference that CPython ships, as a uint8 tensor.

    Raises ValueError where the file is missing, not a file, not readable, or empty.
    """
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics.values()).encode()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"text={path}: {error.strerror}; give a readable file") from None
    if not data:
        raise ValueError(f"text={path} is empty; give a file with more than one sample of text")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def require_samples(text: torch.Tensor, seq_len: int, path: Path | None = None) -> None:
    """Raise ValueError where the text is shorter than one sample with its targets."""
    if len(text) < seq_len + 1:
        raise ValueError(
            f"text={path} has {len(text)} bytes, fewer than one sample of seq_len={seq_len} and its last target; "
            f"use seq_len={max(1, len(text) - 1)} or less"
        )


def digest_of(text: torch.Tensor) -> str:
    """A checksum of the text, by which a checkpoint knows the one it was trained on."""
    return hashlib.blake2b(memoryview(text.numpy()), digest_size=16).hexdigest()


HELD_OUT_PIECES = 20


def hold_out(text: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the text into (training, held out): a twentieth, at least one sample, is held out, in pieces spread through it.

    The text is cut into up to 20 sections of equal length, fewer where a piece would be shorter than a sample; the end of
    each is held out. So both sides see all of the text, whose parts may be of different difficulty, and share no byte.
    Raises ValueError where that leaves too little to train on.
    """
    held = max(len(text) // 20, seq_len + 1)
    if len(text) - held < seq_len + 1:
        raise ValueError(
            f"the text has {len(text)} bytes: too few to hold out a sample of seq_len={seq_len} and train on others; "
            f"use eval_every=0, or seq_len={max(1, len(text) // 2 - 1)} or less"
        )
    pieces = min(HELD_OUT_PIECES, held // (seq_len + 1))
    is_held = torch.zeros(len(text), dtype=torch.bool)
    for i in range(pieces):
        stop = len(text) * (i + 1) // pieces
        is_held[stop - (held * (i + 1) // pieces - held * i // pieces) : stop] = True
    return text[~is_held], text[is_held]


def batch_of_step(text: torch.Tensor, seed: int, step: int, batch_size: int, seq_len: int) -> Batch:
    """Draw the samples of a step from (seed, step): every rank can make the whole batch and take its own part."""
    digest = hashlib.blake2b(f"batch {seed} {step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    starts = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
    samples = text[starts + torch.arange(seq_len + 1)].long()
    targets = samples[:, 1:].contiguous()
    return Batch(samples[:, :-1].contiguous(), targets, targets.numel())
