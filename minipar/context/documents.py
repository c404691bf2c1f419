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

from minipar.cost.models import ModelShape, core_width, layer_matmul_elems
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
        targets[-1, seq_len - num_padding :] = IGNORE_INDEX
    return Packed(tokens, targets, positions)


def document_cost(shape: ModelShape, length: int) -> float:
    """Return the multiply-adds of a forward of one document of T tokens: T (matrix elements) + L H d T (T+1).

    The second term is attention's two products in L layers of H heads of d features, in which a token looks at itself and
    the tokens before it.
    """
    layers = range(shape.num_layers)
    matrices = sum(layer_matmul_elems(shape, i) for i in layers) + shape.dim * shape.vocab_size
    return length * matrices + shape.num_layers * core_width(shape) * length * (length + 1) / 2


def share_documents(costs: Sequence[float], speeds: Sequence[float]) -> list[list[int]]:
    """Deal documents out to ranks so that the last to finish is early; return each rank's, as indices in ascending order.

    costs   of each document, such as `document_cost` of its length: a long document costs more than two of half its length
    speeds  of each rank, in any unit; all equal for equal machines

    The dearest document goes first, each to the rank that would finish it earliest. For equal speeds the last rank then
    takes at most 4/3 - 1/(3p) of the least time possible (Graham 1969). Each rank packs its own (`pack_documents`), so
    ranks may have different numbers of samples: gradients must be sums, divided by the number of targets of all ranks.
    Raises ValueError for a negative cost or a speed that is not above 0.
    """
    if min(costs, default=0) < 0 or min(speeds) <= 0:
        raise ValueError(
            f"costs={list(costs)}, speeds={list(speeds)}; use costs of 0 or more, speeds above 0"
        )
    shares: list[list[int]] = [[] for _ in speeds]
    loads = [0.0] * len(speeds)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        done_s = [(load + costs[i]) / speed for load, speed in zip(loads, speeds)]
        first = done_s.index(min(done_s))
        loads[first] += costs[i]
        shares[first].append(i)
    return [sorted(share) for share in shares]
