"""The check that tokens and targets are in the vocabulary, with the same error in one process and on every mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.model.value_check import assert_async


def check_vocabulary(name: str, tokens: Tensor, vocab_size: int, ignore_index: int | None = None) -> None:
    """Raise ValueError if a token is not in the vocabulary.

    tokens        int64 of any shape
    ignore_index  None, or a value that is allowed besides 0 ... vocab_size - 1

    Without this check a split vocabulary would give a plausible loss, since each rank would assume that another rank has
    the token. On a GPU the host does not wait for the tokens: as in torch's embedding, the GPU asserts, and the process
    ends.
    """
    ignored = torch.zeros_like(tokens, dtype=torch.bool) if ignore_index is None else tokens == ignore_index
    inside = ignored | (tokens >= 0) & (tokens < vocab_size)
    allowed = f"vocab_size={vocab_size} allows 0 to {vocab_size - 1}"
    if ignore_index is not None:
        allowed += f", and {ignore_index} for one that does not count"
    if not assert_async(inside.all(), f"{name} are not in the vocabulary; {allowed}"):
        counted = tokens[~ignored]
        raise ValueError(f"{name} range from {counted.min()} to {counted.max()}; {allowed}")
