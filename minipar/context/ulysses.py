"""Ulysses: for attention only, ranks exchange all heads of some tokens for all tokens of some heads.

Adds to `simple/ulysses.py`: grouped queries, heads that P does not divide, other layouts, documents.

    [B, H, N/P, d]   -- all-to-all ->   [B, H/P, N, d]   -- attention of one process ->   -- all-to-all back ->

One all-to-all sends queries, keys and values together. Attention itself needs no communication and every rank does
the same work, whatever the mask; but P must divide the heads, or the last ranks get fewer (`pad`). If there are fewer
key/value heads than ranks, each key/value head is sent to all ranks whose queries attend to it.

Sent per rank, for N tokens of each sample, h = heads * head_dim and h_kv = K * head_dim:

    forward    (2 h + 2 h_kv) N (P-1)/P^2 elements: 4 N h (P-1)/P^2 without grouped queries.     backward   the same

K counts a key/value head once per rank that receives it. If P divides the number of key/value heads, K is that number; if
P is a multiple of it (and divides the heads), K is P; if neither divides the other, K is larger than both. If ranks have
different numbers of heads, the formula gives the mean over ranks.

Source: DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm, autograd
from minipar.config.context_limits import check_heads
from minipar.context.token_layout import order_of_gathered
from minipar.model.flash import check_shapes
from minipar.model.flash import flash_attention as flash_attention
from minipar.model.mask import Mask, TokenRun
from minipar.support.chunks import bounds, chunk_sizes
from minipar.support.staging import to_device

# (q, k, v, positions) -> out, on all tokens of some heads
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def ulysses_attention(
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    layout: str = "contiguous",
    positions: Tensor | None = None,
    seq_len: int | None = None,
    impl: str = "auto",
    pad: bool = False,
) -> Tensor:
    """Compute this rank's part of attention over a split sequence; arguments as in `ring_attention`.

    pad  where P does not divide the heads, split them as if padded to a multiple of P: the last ranks have fewer heads,
         or none. The padding is neither sent nor computed

    With documents, the forward sends 8 B N (P-1)/P bytes more, because every rank gathers all positions.
    Raises ValueError if shapes do not fit each other, or P does not divide the heads and pad=False.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        length = q.shape[2]
        mask = Mask((TokenRun(0, length),), (TokenRun(0, length),), causal, positions, seq_len)
        return flash_attention(q, k, v, impl=impl, mask=mask)

    length = q.shape[2] * comm.size
    order = None if layout == "contiguous" else order_of_gathered(length, comm.size, layout)
    return exchange_heads(comm, q, k, v, attend, positions, order, pad=pad)


def exchange_heads(
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend,
    positions: Tensor | None = None,
    order: Tensor | None = None,
    *,
    pad: bool,
) -> Tensor:
    """Call attend(q, k, v, positions) on this rank's heads, for all tokens; return all heads, for this rank's tokens.

    order  None, or the sequence index of each token of all ranks, concatenated in rank order: attend then gets the tokens
           in sequence order
    """
    check_shapes(q, k, v)
    check_heads(q.shape[1], comm.size, pad)
    cut = HeadSplit(q.shape[1], k.shape[1], comm.size)
    to_sorted = None if order is None else to_device(order.argsort(), q.device)
    positions = None if positions is None else _gather_positions(comm, positions, to_sorted)
    q, k, v = _to_heads(comm, cut, q, k, v, to_sorted)
    out = attend(q, k, v, positions) if q.shape[1] else q
    return _to_tokens(comm, cut, out, order)


class HeadSplit(NamedTuple):
    """The heads of each rank: consecutive query heads, and the key/value heads that these attend to."""

    num_heads: int
    num_kv_heads: int
    size: int

    def queries(self, rank: int) -> slice:
        edges = bounds(chunk_sizes(self.num_heads, self.size))
        return slice(edges[rank], edges[rank + 1])

    def keys(self, rank: int) -> slice:
        queries, group = self.queries(rank), self.num_heads // self.num_kv_heads
        return slice(queries.start // group, -(-queries.stop // group)) if _length(queries) else slice(0, 0)

    def parts(self, rank: int) -> list[int]:
        """Return the number of heads of q, of k and of v that `rank` gets."""
        return [_length(self.queries(rank)), *2 * [_length(self.keys(rank))]]

    def key_of_each_query(self, rank: int) -> list[int] | None:
        """Return, for each query head of `rank`, the index of its key/value head; None if these are shared evenly."""
        queries, keys = self.queries(rank), self.keys(rank)
        group = self.num_heads // self.num_kv_heads
        reads = [head // group - keys.start for head in range(queries.start, queries.stop)]
        even = _length(queries) // max(1, _length(keys))
        return None if reads == [i // max(1, even) for i in range(len(reads))] else reads


def _to_heads(
    comm: Comm, cut: HeadSplit, q: Tensor, k: Tensor, v: Tensor, to_sorted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads: [B, H, N/P, d] -> [B, H/P, N, d] for all three, in one all-to-all."""
    batch, _, tokens, head_dim = q.shape
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    ranks = range(comm.size)
    packed = torch.cat([x for r in ranks for x in (q[cut.queries(r)], k[cut.keys(r)], v[cut.keys(r)])])
    mine = cut.parts(comm.rank)
    received = autograd.all_to_all(comm, packed, [sum(cut.parts(r)) for r in ranks], [sum(mine)] * comm.size)
    received = received.view(comm.size, sum(mine), batch, tokens, head_dim)
    whole = received.permute(2, 1, 0, 3, 4).flatten(2, 3)
    whole = whole if to_sorted is None else whole.index_select(2, to_sorted)
    q, k, v = torch.split(whole, mine, dim=1)
    reads = cut.key_of_each_query(comm.rank)
    if reads is not None:
        index = to_device(torch.tensor(reads), k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    return q, k, v


def _to_tokens(comm: Comm, cut: HeadSplit, out: Tensor, order: Tensor | None) -> Tensor:
    """Exchange heads for tokens: [B, H/P, N, d] -> [B, H, N/P, d]."""
    out = out if order is None else out.index_select(2, to_device(order, out.device))
    parts = torch.unflatten(out, 2, (comm.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)
    heads = [cut.parts(r)[0] for r in range(comm.size)]
    return autograd.all_to_all(comm, parts, [heads[comm.rank]] * comm.size, heads).transpose(0, 1)


def _gather_positions(comm: Comm, positions: Tensor, to_sorted: Tensor | None) -> Tensor:
    """Gather all tokens' positions: [N/P] or [B, N/P] -> [N] or [B, N]."""
    whole: Tensor = comm.all_gather(positions.movedim(-1, 0).contiguous()).movedim(0, -1)
    return whole if to_sorted is None else whole[..., to_sorted]


def _length(part: slice) -> int:
    return len(range(part.start, part.stop))
