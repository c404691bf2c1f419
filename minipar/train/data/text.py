"""The text as token ids, and the batch of a step, which is a function of seed and step and the same on every mesh."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from minipar.config.train_config import TrainConfig
from minipar.context import next_tokens
from minipar.train.data.epoch import starts_of_step
from minipar.train.data.token_file import TokenFile, open_bytes, open_tokens, pieces_of
from minipar.train.data.tokenizer import Tokenizer, tokens_of_text


class Batch(NamedTuple):
    """All samples of a step: tokens and targets [B, T] int64, and the number of targets that count.

    positions  [B, T] int64, each token's position in its document; None: each sample is one document
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    num_targets: int
    positions: torch.Tensor | None = None

    def on(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return tokens, targets and positions on `device`."""
        positions = None if self.positions is None else self.positions.to(device)
        return self.tokens.to(device), self.targets.to(device), positions

    def samples(self, ids: torch.Tensor) -> Batch:
        """Return these samples, with the number of targets of the whole batch."""
        positions = None if self.positions is None else self.positions[ids]
        return Batch(self.tokens[ids], self.targets[ids], self.num_targets, positions)


class TextId(NamedTuple):
    """The identity of a text in a checkpoint: a checksum, the number of tokens to train on, and the codec's name."""

    digest: str = ""
    num_tokens: int = 0
    codec: str = "bytes"


NO_TEXT = TextId()


def load_text(path: Path | None) -> torch.Tensor | TokenFile:
    """Return the bytes of a file, uint8, mapped into memory; without a file, the text of CPython's language reference.

    Raises ValueError if the file is missing, not a file, not readable, or empty.
    """
    if path is not None:
        return open_bytes(Path(path))
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def load_data(config: TrainConfig) -> tuple[torch.Tensor | TokenFile, str]:
    """Return the token ids of this run's text, and their checksum, for which all of them are read once.

    Raises ValueError if they cannot be read, are too few for a sample, or include an id outside the model's vocabulary.
    """
    codec = None if config.tokenizer is None else Tokenizer(config.tokenizer)
    if codec is not None and codec.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"vocab_size={config.model.vocab_size} does not hold the {codec.vocab_size} tokens of "
            f"tokenizer={config.tokenizer}; use {codec.vocab_size} or more"
        )
    text: torch.Tensor | TokenFile
    if config.tokens is not None:
        text = open_tokens(config.tokens, config.model.vocab_size)
    elif codec is not None:
        text = tokens_of_text(config.text, codec)
    else:
        text = load_text(config.text)
    path = config.text if config.tokens is None else config.tokens
    unit = "bytes" if config.tokens is None and codec is None else "tokens"
    require_samples(text, config.seq_len, path, "text" if config.tokens is None else "tokens", unit)
    return text, digest_of(text, config.model.vocab_size, path)


def require_samples(
    text: Text, seq_len: int, path: Path | None = None, name: str = "text", unit: str = "bytes"
) -> None:
    """Raise ValueError if the text is shorter than one sample with its targets. Without a path, it is the embedded text."""
    if len(text) < seq_len + 1:
        what = "the embedded text" if path is None else f"{name}={path}"
        raise ValueError(
            f"{what} has {len(text)} {unit}, fewer than one sample of seq_len={seq_len} and its last target; "
            f"use seq_len={max(1, len(text) - 1)} or less"
        )


def digest_of(text: torch.Tensor | TokenFile, vocab_size: int = 1 << 32, path: Path | None = None) -> str:
    """Return a checksum of the text, by which a checkpoint recognises it. It does not depend on the dtype of the ids.

    Raises ValueError if a token is outside the vocabulary (the message says where), or if 32-bit ids of a headerless file
    were read as 16-bit ids.
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
        digest.update(piece.data)
        place += len(piece)
    has_header = path is not None and path.suffix == ".npy"  # which says the dtype
    if only_zeros and not has_header and isinstance(text, TokenFile) and text.array.dtype == "uint16":
        raise ValueError(
            f"tokens={path}: every second token is 0, as if ids of 32 bits were read as 16; use a .npy file, which says "
            "its dtype"
        )
    return digest.hexdigest()


# Held-out text -------------------------------------------------------------------------------------------------

HELD_OUT_PIECES = 20


class Part:
    """Several ranges [start, stop) of a text as one sequence, without a copy."""

    def __init__(self, text: Text, runs: list[tuple[int, int]]):
        starts, stops = torch.tensor(runs).T
        self._text, ends = text, (stops - starts).cumsum(0)
        self._ends, self._moved_by = ends, stops - ends

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: torch.Tensor) -> torch.Tensor:
        return self._text[places + self._moved_by[torch.bucketize(places, self._ends, right=True)]]


Text = torch.Tensor | TokenFile | Part  # token ids, indexed by position


def hold_out(text: Text, seq_len: int) -> tuple[Part, Part]:
    """Split the text into (training, held out). A twentieth of it, at least one sample, is held out, in spread-out pieces.

    The text is cut into up to 20 sections of equal length, and the end of each section is held out; there are fewer
    sections if a held-out piece would be shorter than a sample. So both parts cover the whole text, whose difficulty may
    vary, and share no token.
    Raises ValueError if that leaves too little for training.
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

DOCUMENTS = 4  # of a sample, on average


def batch_of(config: TrainConfig, text: Text, step: int) -> Batch:
    """Return the batch of a step of this run, with documents if its model has any."""
    batch = batch_of_step(text, config.seed, step, config.batch_size, config.seq_len, config.sampling)
    return with_documents(batch, config.seed, step) if config.model.documents else batch


def with_documents(batch: Batch, seed: int, step: int) -> Batch:
    """Cut samples into documents at places drawn from (seed, step), about DOCUMENTS in each sample.

    The last token of a document has no target, except at a sample's end, where the document goes on in the text.
    """
    # Drawn by numpy, and not by torch, so that a dry run, whose tensors have no values, has documents, too.
    shape = tuple(batch.tokens.shape)
    drawn = np.random.default_rng(_drawn(f"documents {seed} {step}")).random(shape)
    begins = drawn < (DOCUMENTS - 1) / max(1, shape[1] - 1)
    index = np.arange(shape[1])
    positions = torch.from_numpy(index - np.maximum.accumulate(np.where(begins, index, 0), axis=1))
    targets = next_tokens(batch.tokens, positions)
    targets[:, -1] = batch.targets[:, -1]
    return Batch(batch.tokens, targets, batch.num_targets - int(begins[:, 1:].sum()), positions)


def batch_of_step(
    text: Text, seed: int, step: int, batch_size: int, seq_len: int, sampling: str = "random"
) -> Batch:
    """Draw the samples of a step from (seed, step), so that every rank can make the whole batch and take its own part.

    sampling  random: each sample begins anywhere in the text, independently of all other samples
              epoch: the text is cut into samples, and each is drawn once before any is drawn again (`epoch.py`)
    """
    if sampling == "epoch":
        starts = starts_of_step(len(text), seed, step, batch_size, seq_len)
    else:
        generator = torch.Generator().manual_seed(_drawn(f"batch {seed} {step}"))
        starts = torch.randint(len(text) - seq_len, (batch_size,), generator=generator)
    samples = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    targets = samples[:, 1:].contiguous()
    return Batch(samples[:, :-1].contiguous(), targets, targets.numel())


def _drawn(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
