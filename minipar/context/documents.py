"""Several documents packed into one sample, none of which attends to or predicts another.

The tokens' positions are enough to tell the documents apart: they count from 0 in every document, so a token's document
starts at its index minus its position, and ends where the next token's position is 0. Positions are split over ranks like
tokens, and every mask is made from them (`minipar.model.mask`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.model import IGNORE_INDEX


class Packed(NamedTuple):
    """tokens, targets and positions [B, T]: a batch for a model with `documents=True`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor


def document_positions(lengths: Sequence[int]) -> Tensor:
    """Return the position of each token in its document: lengths 3, 2 -> 0 1 2 0 1."""
    return torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.empty(0).long()


def next_tokens(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return each token's target: the next token, or IGNORE_INDEX where its document ends.

    tokens, positions, targets  [..., T]
    """
    targets = torch.full_like(tokens, IGNORE_INDEX)
    same_document = positions[..., 1:] == positions[..., :-1] + 1
    targets[..., :-1] = torch.where(same_document, tokens[..., 1:], IGNORE_INDEX)
    return targets


def pack_documents(documents: Sequence[Tensor], seq_len: int) -> Packed:
    """Fill samples of `seq_len` tokens with documents, in order; a document that does not fit continues in the next sample.

    Its continuation counts as a document of its own. The last sample is padded with tokens 0, whose targets
    are IGNORE_INDEX.
    """
    tokens = torch.cat(list(documents))
    num_padding = -len(tokens) % seq_len
    positions = torch.cat(
        [document_positions([len(document) for document in documents]), torch.arange(num_padding)]
    )
    tokens = torch.cat([tokens, tokens.new_zeros(num_padding)]).view(-1, seq_len)
    positions = positions.view(-1, seq_len)
    # Where a sample begins in the middle of a document, that document's part counts from 0.
    index = torch.arange(seq_len)
    first_position = positions[:, :1]
    positions = torch.where(positions - first_position == index, index, positions)
    targets = next_tokens(tokens, positions)
    if num_padding:
        targets[-1, seq_len - num_padding - 1 :] = IGNORE_INDEX
    return Packed(tokens, targets, positions)
