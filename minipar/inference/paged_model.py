"""The model over a paged KV cache: one forward of new tokens of any number of requests, each at its own position.

All tokens of a forward ("pass") form one batch of N rows with one token each. Everything in the model except attention
processes each row independently, so rows of several requests can be in one batch without padding. Attention distinguishes
the requests. It writes the keys and values of the new tokens to the blocks, gathers each request's keys and values by the
request's table, and computes the model's attention for that request alone:

    rows     request 0: tokens 5 6 7  |  request 1: token 12  |  request 2: tokens 0 1
    layer    norms, projections, MLP: [N, 1, D], for the rows of all requests at once
    core     request by request: queries [1, H, T, d] over keys [1, h_kv, S, d]

R requests with one new token each, as all have after their prompts, go through a core at once (`TOGETHER`): queries
[R, h_kv, H / h_kv, d] over keys [R, h_kv, S, d], where S is the longest text's, and a mask hides what a shorter one lacks.

With multi-head latent attention, the blocks hold the latents, and the core runs on these, with absorbed matrices: see
`LatentAttention`.

"The same text in every batch" holds up to rounding: for each request the same terms are added, but a matrix product may add
them in another order when the batch has other rows. In float64 the difference is 1e-15 of the logits, and the text is
identical unless the logits of two tokens are that close. In float32 and bfloat16 such ties are less rare. With
`one_by_one`, every token goes through the model in a forward of its own. Then no shape depends on other requests, on
blocks, or on how a prompt is divided, and the logits are bitwise equal in every dtype. The price is that weights are not
reused: a forward loads all of them for one token instead of for N.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.inference.blocks import (
    WHOLE,
    BlockMemory,
    BlockPool,
    Pass,
    Rows,
    Share,
    blocks_for,
)
from minipar.inference.expert_shares import OwnShare, spread_mixtures
from minipar.inference.quantized_blocks import QuantizedBlockMemory, check_quantization
from minipar.inference.split_keys import SplitCore, SplitPass, goes_by_ring
from minipar.mesh import Mesh
from minipar.model.attention import Attention, fused_attention, plain_attention
from minipar.model.evaluating import evaluating
from minipar.model.latent_attention import LatentAttention
from minipar.model.overrides import AttentionCore
from minipar.model.transformer import Transformer
from minipar.support.errors import require_divides


def require_cacheable(
    config: ModelConfig, block_size: int, cp: int, cache_bits: int | None, cache_group: int
) -> None:
    """Raise ValueError if a token's keys and values may depend on other requests, or cannot be split over cp ranks."""
    if cp > 1 and cache_bits is not None:
        raise ValueError(f"cache_bits={cache_bits} with cp={cp}: a block is rounded as a whole; use cp=1")
    if cp > 1 and config.kv_latent_dim:
        raise ValueError(f"cp={cp}: caches of latents are not spread over cp; use cp=1")
    if config.num_experts and config.capacity_factor is not None:
        raise ValueError(
            f"capacity_factor={config.capacity_factor}: experts that fill up drop tokens of one request for another's; "
            f"use a model without a capacity"
        )
    if cache_bits is not None:
        check_quantization(config, cache_bits, min(cache_group, config.head_dim))
    require_divides("cp", cp, "block_size", block_size)


def plain_masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


# The cores that also attend to texts of different lengths at once: q [R, h, G, d], k and v [R, h, S, d], seen [R, 1, 1, S].
TOGETHER: dict[AttentionCore, Callable[..., Tensor]] = {
    fused_attention: F.scaled_dot_product_attention,
    plain_attention: plain_masked,
}
# The keys and values of one layer that are gathered at once. A CPU's must stay in its caches: reading request by request is
# faster where they don't, up to six times. A GPU needs few large kernels.
GATHERED_BYTES = defaultdict(lambda: 256 * 2**20, cpu=4 * 2**20)


class PagedCore:
    """Replaces the core of one attention module for one forward: finds keys and values by the requests' tables."""

    def __init__(self, core: AttentionCore, memory: BlockMemory, of_pass: Pass):
        self.core, self.memory, self.of_pass = core, memory, of_pass

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, positions: Tensor | None = None
    ) -> Tensor:
        """Return each new token's attention over its own request's tokens so far.

        q, out  [N, H, 1, head_dim]      k, v  [N, h_kv, 1, head_dim]    of the N new tokens

        `positions` are not needed: a request is one document, and its table determines the positions.
        """
        self.memory.write(self.of_pass.slots, k.squeeze(2), v.squeeze(2))
        out, first = torch.empty_like(q), 0
        for own_rows, slots, seen in self.of_pass.together:
            keys, values = self.memory.read_together(slots)
            # [R, h_kv, H / h_kv, head_dim]: the query heads that share a key head, as the queries of that head
            queries = q[own_rows].unflatten(1, (keys.shape[1], -1)).squeeze(3)
            attended = TOGETHER[self.core](queries, keys, values, seen)
            out[own_rows] = attended.flatten(1, 2).unsqueeze(2)
        for i, rows in enumerate(self.of_pass.requests):
            if i not in self.of_pass.tables:
                first += 1
                continue
            begin = rows.begin
            for end, keys, values in self.memory.views(self.of_pass.tables[i], rows.begin, rows.end):
                own = slice(first, first + end - begin)
                queries = q[own].permute(2, 1, 0, 3)  # [1, H, T, head_dim]
                out[own] = self.core(queries, keys, values, causal=True).permute(2, 1, 0, 3)
                first, begin = own.stop, end
        return out


class PagedModel:
    """A model or a stage of it, possibly split over tp and ep, whose keys and values are stored in the blocks of a pool.

    mesh  None, or the mesh of its ranks: each cp rank stores a part of every block (`split_keys.py`), and each ep rank has
          its own experts (`expert_shares.py`)

    Raises ValueError if keys and values cannot be cached (experts with a capacity, under which a token's result depends on
    other requests' tokens, or a model changed by `context_parallel`), if cp does not divide the block size, or if the
    experts are not split over the ep ranks.
    """

    def __init__(
        self,
        model: Transformer,
        pool: BlockPool,
        one_by_one: bool = False,
        cache_bits: int | None = None,
        cache_group: int = 64,
        mesh: Mesh | None = None,
    ):
        cp = 1 if mesh is None else mesh.sizes["cp"]
        require_cacheable(model.config, pool.block_size, cp, cache_bits, cache_group)
        mixtures = spread_mixtures(model, mesh)
        self.mixtures = mixtures if cp == 1 else []  # with cp, tokens reach their experts as in training
        self.cp = mesh.comm("cp") if mesh is not None and cp > 1 else None
        self.own_share = None if mesh is None else partial(OwnShare, mesh.comm("ep"))
        self.share = WHOLE if self.cp is None else Share(self.cp.rank, self.cp.size)
        if model.overrides.default_positions is not None:
            raise ValueError("default_positions has been replaced: this model reads a part of every sample")
        self.model, self.pool, self.one_by_one = model, pool, one_by_one
        self.attentions = [m for m in model.modules() if isinstance(m, Attention)]
        weight = next(model.parameters())
        make: Callable[..., BlockMemory] = BlockMemory
        if cache_bits is not None:
            make = partial(
                QuantizedBlockMemory, bits=cache_bits, group=min(cache_group, model.config.head_dim)
            )
        of_share = BlockPool(pool.num_blocks, pool.block_size // cp) if cp > 1 else pool
        kind = weight.dtype, weight.device
        self.memories = [
            BlockMemory(of_share, 1, a.latent_dim + a.rope_dim, *kind, are_same=True)
            if isinstance(a, LatentAttention)
            else make(of_share, a.num_kv_heads, a.head_dim, *kind)
            for a in self.attentions
        ]
        self.most_together = 0
        if self.cp is None and cache_bits is None and not one_by_one:
            of_layer = max((memory.nbytes for memory in self.memories), default=1)
            num_tokens = pool.num_blocks * pool.block_size
            self.most_together = GATHERED_BYTES[self.device.type] * num_tokens // of_layer

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def __call__(self, requests: Sequence[Rows], hidden: Tensor | None = None) -> Tensor:
        """Run the new tokens of these requests; return the logits of all N rows, [N, V], or a stage's output, [N, 1, D].

        hidden  the input of a stage that is not the first, [N, 1, D]

        Under cp, N counts the rows of this rank: `num_rows`.

        Raises RuntimeError if a request would write to a block that has other holders, too.
        """
        b = self.pool.block_size
        for rows in requests:
            for block in rows.table[rows.begin // b : blocks_for(rows.end, b)]:
                self.pool.require_writable(block)
        if not self.one_by_one:
            return self._read(requests, hidden)
        single = [
            Rows([token], rows.begin + i, rows.table)
            for rows in requests
            for i, token in enumerate(rows.tokens)
        ]
        inputs = (
            [None] * len(single) if hidden is None else hidden.split([self.num_rows([x]) for x in single])
        )
        return torch.cat([self._read([row], x) for row, x in zip(single, inputs)])

    def num_rows(self, requests: Sequence[Rows]) -> int:
        """Return the number of new tokens that this rank computes: its share under cp, otherwise all."""
        return sum(len(self.share.tokens(rows.begin, rows.end)) for rows in requests)

    def copy_block(self, source: int, destination: int) -> None:
        for memory in self.memories:
            memory.copy(source, destination)

    def settle(self, table: Sequence[int], num_tokens: int) -> None:
        """Note that these tokens are final, so that their blocks may be quantized."""
        for memory in self.memories:
            memory.settle(table, num_tokens)

    def save(self, table: Sequence[int]) -> list[list[Tensor]]:
        """Return copies of a request's blocks in CPU memory, for each layer."""
        where = torch.tensor(table, device=self.device)
        return [memory.save(where) for memory in self.memories]

    def load(self, table: Sequence[int], saved: Sequence[list[Tensor]]) -> None:
        """Load copies made by `save` into the blocks of `table`."""
        where = torch.tensor(table, device=self.device)
        for memory, blocks in zip(self.memories, saved, strict=True):
            memory.load(where, blocks)

    def _read(self, requests: Sequence[Rows], hidden: Tensor | None) -> Tensor:
        most_together = self.most_together if all(a.core in TOGETHER for a in self.attentions) else 0
        of_pass = Pass.of(requests, self.pool.block_size, self.device, self.share, most_together)
        with evaluating(self.model), self._paged(of_pass):
            out: Tensor = self.model(of_pass.tokens if hidden is None else hidden)
        return out.squeeze(1) if self.model.last else out

    @contextmanager
    def _paged(self, of_pass: Pass) -> Iterator[None]:
        cores = [a.overrides.core for a in self.attentions]
        self.model.overrides.default_positions = lambda T, device: of_pass.positions
        for attention, core in zip(self.attentions, self._cores(of_pass)):
            attention.overrides.core, attention.overrides.absorbed = core, True
        dispatches = [moe.overrides.dispatch_tokens for moe in self.mixtures]
        for moe in self.mixtures:
            moe.overrides.dispatch_tokens = self.own_share
        try:
            yield
        finally:
            self.model.overrides.default_positions = None
            for attention, old in zip(self.attentions, cores):
                attention.overrides.core, attention.overrides.absorbed = old, False
            for moe, dispatch in zip(self.mixtures, dispatches):
                moe.overrides.dispatch_tokens = dispatch

    def _cores(self, of_pass: Pass) -> list[AttentionCore]:
        """Return the cores that replace those of the attention modules for one forward."""
        if self.cp is None:
            return [PagedCore(a.core, memory, of_pass) for a, memory in zip(self.attentions, self.memories)]
        a, cp = self.attentions[0], self.cp
        by_ring = [
            goes_by_ring(rows, cp.size, a.num_heads, a.num_kv_heads, a.head_dim) for rows in of_pass.requests
        ]
        ways = SplitPass.of(of_pass.requests, cp, by_ring, self.device)
        return [SplitCore(cp, memory, of_pass, ways) for memory in self.memories]
