"""Layouts: the tokens of a sequence that each rank holds.

    contiguous   rank r has the r-th of P pieces
    zigzag       rank r has the r-th of 2P pieces from the start and the r-th from the end
    striped      rank r has tokens r, r + P, r + 2P, ...

Under a causal mask late tokens see more keys than early tokens. So contiguous gives rank r the work of r + 1/2 blocks;
zigzag and striped give every rank the same work (zigzag exactly, striped up to a diagonal).

Sources: zigzag: Llama 3, arXiv:2407.21783, section 3.3.2; striped: arXiv:2311.09431.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.config.context_limits import local_ranges, padded_length
from minipar.model import IGNORE_INDEX
from minipar.model.mask import Mask, TokenRun, indices


def local_runs(seq_len: int, rank: int, size: int, layout: str = "zigzag") -> tuple[TokenRun, ...]:
    """Return the tokens of `rank`, in the order in which it holds them.

    Raises ValueError if the layout is unknown or cannot split seq_len, saying what to pad to.
    """
    return _runs(local_ranges(seq_len, rank, size, layout))


def local_positions(
    seq_len: int, rank: int, size: int, layout: str = "zigzag", ulysses_size: int = 1
) -> Tensor:
    """Return the sequence indices of the tokens of `rank`: int64 [seq_len / size].

    ulysses_size  above 1: `layout` splits the sequence over groups of this many neighbouring ranks, and each rank of a
                  group holds a contiguous piece of the group's tokens (see `usp.py`)
    """
    return indices(_runs(local_ranges(seq_len, rank, size, layout, ulysses_size)))


def _runs(ranges: tuple[range, ...]) -> tuple[TokenRun, ...]:
    return tuple(TokenRun(run.start, len(run), run.step) for run in ranges)


def order_of_gathered(seq_len: int, size: int, layout: str, ulysses_size: int = 1) -> Tensor:
    """Return the sequence indices of all ranks' tokens, concatenated in rank order: int64 [seq_len]."""
    return torch.cat([local_positions(seq_len, r, size, layout, ulysses_size) for r in range(size)])


def take_local(
    x: Tensor, rank: int, size: int, layout: str = "zigzag", dim: int = 1, ulysses_size: int = 1
) -> Tensor:
    """Return the tokens of `rank` of a whole sequence along `dim`."""
    positions = local_positions(x.shape[dim], rank, size, layout, ulysses_size)
    return x.index_select(dim, positions.to(x.device))


def join_local(parts: list[Tensor], layout: str = "zigzag", dim: int = 1, ulysses_size: int = 1) -> Tensor:
    """Join the tokens of all ranks, given in rank order, into the whole sequence: the inverse of `take_local`."""
    gathered = torch.cat(parts, dim)
    order = order_of_gathered(gathered.shape[dim], len(parts), layout, ulysses_size)
    return gathered.index_select(dim, order.argsort().to(gathered.device))


class LocalBatch(NamedTuple):
    """This rank's tokens [B, T/P], their targets [B, T/P], and their positions [T/P] or, with documents, [B, T/P]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor


def local_batch(
    tokens: Tensor,
    targets: Tensor,
    rank: int,
    size: int,
    layout: str = "zigzag",
    positions: Tensor | None = None,
    pad: bool = False,
    ulysses_size: int = 1,
) -> LocalBatch:
    """Return the part of a batch for `rank`: the arguments of `model.loss(tokens, targets, positions, count=...)`.

    tokens, targets  [B, T]             the whole batch, on every rank
    positions        [T] or [B, T]      each token's position in its document; default 0 ... T-1
    pad              pad to a length that the layout can split. The padding comes last, so under a causal mask no other
                     token sees it, and its targets are ignored. If positions are given, it is a document of its own

    `count` is the number of counted targets in the whole batch; with it, the ranks' losses and gradients sum to one
    process's.
    """
    num_padding = padded_length(tokens.shape[1], size, layout, ulysses_size) - tokens.shape[1] if pad else 0
    if positions is None:
        positions = torch.arange(tokens.shape[1] + num_padding, device=tokens.device)
    elif num_padding:
        padding = torch.arange(num_padding, device=positions.device).expand(
            *positions.shape[:-1], num_padding
        )
        positions = torch.cat([positions, padding], dim=-1)
    whole = F.pad(tokens, (0, num_padding)), F.pad(targets, (0, num_padding), value=IGNORE_INDEX), positions
    return LocalBatch(*(take_local(x, rank, size, layout, x.dim() - 1, ulysses_size) for x in whole))


def causal_work(seq_len: int, rank: int, size: int, layout: str) -> int:
    """Return the number of scores that `rank` computes in causal attention: pairs of a query of its own and a key it sees.

    contiguous   n (r n) + n (n+1) / 2                with n = T/P
    zigzag       n/2 ((2P-1) n/2 + n/2 + 1)           the same for every rank: a P-th of T (T+1) / 2
    striped      n (r+1) + P n (n-1) / 2
    """
    return Mask(local_runs(seq_len, rank, size, layout), (TokenRun(0, seq_len),)).count()
