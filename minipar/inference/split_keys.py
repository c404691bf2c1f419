"""Context parallelism: the KV cache of every request is split over the cp ranks by token, and stays where it was written.

    token t of a request   is computed on rank t mod cp, and its keys and values stay there
    a block of b tokens    is b / cp tokens on every rank, in the same block of each rank's memory

All ranks have the same tables, so a block is copied, swapped and found by its prefix without a message, and each rank
stores the same number of tokens of every text, give or take one. If whole blocks were dealt to the ranks instead, copying
one could need a message, a piece of a prompt within one block would be computed on one rank only, and a short text would be
stored on few ranks.

Everything in the model except attention processes each token independently, so a rank computes it for its own tokens only.
Attention of T new tokens over the S tokens of their text needs the other ranks' keys, so either queries or keys must move.
All ranks together send, per layer, with H query heads and h_kv key/value heads of d features:

    split keys   queries go to all ranks, each rank attends to its own keys, and (out, log-sum-exp) return to the rank of
                 the query, which merges them: (cp - 1) T H d elements out, (cp - 1) T H (d + 1) back
    ring         keys and values circulate, and every rank attends to them with its own queries, as in training
                 (`context/attention_ring.py`): (cp - 1) cp ceil(S / cp) 2 h_kv d elements

Attention of a single new token uses split keys, whose messages do not grow with the text. A piece of a prompt uses the way
that sends fewer elements: the ring at the beginning of a prompt, split keys when a short piece follows a long text.
Partial results are merged in float32 or wider, and outs and log-sum-exps are sent in that precision. Queries of all
requests of a step are sent together; each ring serves one request.

Source: arXiv:2411.01783 (pass-KV and pass-Q; there the choice also depends on the time of computing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.context.attention_ring import Ring
from minipar.inference.blocks import BlockMemory, Pass, Rows, Share
from minipar.model.flash import choose
from minipar.model.lse_merge import empty_attention, merge_
from minipar.model.mask import Mask, TokenRun


def split_keys_elems(num_tokens: int, cp: int, num_heads: int, head_dim: int) -> int:
    """Return the number of elements that all ranks send for one layer's attention of T new tokens, by split keys."""
    return (cp - 1) * num_tokens * num_heads * (2 * head_dim + 1)


def ring_elems(text_len: int, cp: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the number of elements that all ranks send for one layer's attention over S tokens, by a ring."""
    return (cp - 1) * cp * -(-text_len // cp) * 2 * num_kv_heads * head_dim


def goes_by_ring(rows: Rows, cp: int, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Return whether these new tokens use a ring: if there are several, and a ring sends less than split keys."""
    T = len(rows.tokens)
    ring = ring_elems(rows.end, cp, num_kv_heads, head_dim)
    return T > 1 and ring < split_keys_elems(T, cp, num_heads, head_dim)


class SplitPass(NamedTuple):
    """For each request of a forward, whether queries or keys move; computed once for all layers.

    own       for each request, those of this rank's rows that are its tokens
    by_ring   for each request, whether keys move instead of queries
    asking    [n] this rank's rows whose queries go to all ranks
    sizes     for each rank, the number of its rows whose queries go to all ranks
    gathered  for each request, its rows among the gathered queries of all ranks, in rank order; none if its keys move
    """

    own: Sequence[Tensor]
    by_ring: Sequence[bool]
    asking: Tensor
    sizes: Sequence[int]
    gathered: Sequence[Tensor]

    @classmethod
    def of(
        cls, requests: Sequence[Rows], cp: Comm, by_ring: Sequence[bool], device: torch.device
    ) -> SplitPass:
        counts = [[len(Share(r, cp.size).tokens(x.begin, x.end)) for x in requests] for r in range(cp.size)]
        asked = [[0 if ring else n for n, ring in zip(of_rank, by_ring)] for of_rank in counts]
        own = torch.arange(sum(counts[cp.rank]), device=device).split(counts[cp.rank])
        asking = torch.cat([rows[:n] for rows, n in zip(own, asked[cp.rank])])
        everyone = torch.arange(sum(map(sum, asked)), device=device).split([n for x in asked for n in x])
        gathered = [torch.cat(everyone[i :: len(requests)]) for i in range(len(requests))]
        return cls(own, by_ring, asking, [sum(of_rank) for of_rank in asked], gathered)


class SplitCore:
    """Replaces the core of one attention module for one forward over a split cache; see the top of this file."""

    def __init__(self, cp: Comm, memory: BlockMemory, of_pass: Pass, ways: SplitPass):
        self.cp, self.memory, self.of_pass, self.ways = cp, memory, of_pass, ways

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, positions: Tensor | None = None
    ) -> Tensor:
        """Return the attention of this rank's new tokens, each over its request's tokens so far, which are on all ranks.

        q, out  [N_r, H, 1, head_dim]      k, v  [N_r, h_kv, 1, head_dim]    N_r may be 0
        """
        self.memory.write(self.of_pass.slots, k.squeeze(2), v.squeeze(2))
        ways, out = self.ways, torch.empty_like(q)
        for i, place in enumerate(ways.own):
            if ways.by_ring[i]:
                out[place] = self._by_ring(i, q[place].permute(2, 1, 0, 3)).permute(2, 1, 0, 3)
        if sum(ways.sizes):
            out[ways.asking] = self._by_split_keys(q[ways.asking]).to(q.dtype)
        return out

    def _by_ring(self, i: int, q: Tensor) -> Tensor:
        """Send a request's keys around the ring; return the attention of its new tokens here, [1, H, T_r, head_dim]."""
        rows, size = self.of_pass.requests[i], self.cp.size
        keys, values = self._own_keys(i)
        longest = -(-rows.end // size)
        # All messages of a ring have the same length. The padding comes after the last token, so no query attends to it.
        keys, values = (F.pad(x, (0, 0, 0, longest - x.shape[2])) for x in (keys, values))
        queries = self._run(self.cp.rank, rows.begin, rows.end)

        def mask_of(source: int) -> Mask:
            return Mask((queries,), (TokenRun(source, longest, size),))

        return Ring(self.cp, mask_of, choose("auto", q, mask_of(self.cp.rank))).attend(q, keys, values)

    def _by_split_keys(self, q: Tensor) -> Tensor:
        """Return the attention of this rank's queries, [n, H, 1, head_dim], over the keys of all ranks."""
        everyone = self.cp.all_gather(q.squeeze(2), list(self.ways.sizes))  # [sum of sizes, H, head_dim]
        parts = self._parts(everyone)
        n = len(q)
        mine = self.cp.all_to_all(parts, list(self.ways.sizes), [n] * self.cp.size)
        out, lse = empty_attention(q)
        for part in mine.unflatten(0, (self.cp.size, n)):
            merge_(out, lse, part[:, :, None, :-1], part[..., -1:])
        return out

    def _parts(self, everyone: Tensor) -> Tensor:
        """Return out and log-sum-exp of all ranks' queries over this rank's keys, concatenated: [n, H, head_dim + 1]."""
        dtype = torch.promote_types(everyone.dtype, torch.float32)
        parts = everyone.new_empty(*everyone.shape[:2], everyone.shape[2] + 1, dtype=dtype)
        for i, where in enumerate(self.ways.gathered):
            if self.ways.by_ring[i]:
                continue
            rows = self.of_pass.requests[i]
            q = everyone[where].transpose(0, 1)[None]  # [1, H, T, head_dim], in rank order
            keys, values = self._own_keys(i)
            queries = tuple(self._run(rank, rows.begin, rows.end) for rank in range(self.cp.size))
            mask = Mask(queries, (self._run(self.cp.rank, 0, rows.end),))
            out, lse = empty_attention(q)
            choose("auto", q, mask).forward_(out, lse, q, keys, values, mask)
            parts[where] = torch.cat((out, lse[..., None]), dim=-1)[0].transpose(0, 1)
        return parts

    def _own_keys(self, i: int) -> tuple[Tensor, Tensor]:
        """Return this rank's keys and values of request i, [1, h_kv, S_r, head_dim] each."""
        num_tokens = self._run(self.cp.rank, 0, self.of_pass.requests[i].end).length
        return self.memory.read(self.of_pass.tables[i], num_tokens)

    def _run(self, rank: int, begin: int, end: int) -> TokenRun:
        tokens = Share(rank, self.cp.size).tokens(begin, end)
        return TokenRun(tokens.start, len(tokens), self.cp.size)


def gather_logits(cp: Comm, rows: Sequence[Rows], own: Tensor) -> Tensor | None:
    """Send the logits from which tokens are chosen to the first cp rank; return them there, [N, V], and None elsewhere.

    own  [N_r, V]    the logits of this rank's tokens

    Rows from which no token is chosen are 0 in the result. Each of the other rows that is not on the first rank costs a
    message of V elements.
    """
    places = [(t % cp.size, t >= x.end - x.num_chosen) for x in rows for t in range(x.begin, x.end)]
    here = own[[is_wanted for rank, is_wanted in places if rank == cp.rank]]
    if cp.rank > 0:
        if len(here):
            cp.send(here, 0)
        return None
    logits = own.new_zeros(len(places), own.shape[1])
    for rank in range(cp.size):
        if wanted := [row for row, place in enumerate(places) if place == (rank, True)]:
            shape = len(wanted), own.shape[1]
            logits[wanted] = here if rank == 0 else cp.recv(shape, own.dtype, rank)
    return logits
