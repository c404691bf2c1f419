"""What the tests of context parallelism draw: a sequence that ranks share, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from minipar.config.context_limits import LAYOUTS, length_multiple
from minipar.context import (
    all_gather_attention,
    document_positions,
    ring_attention,
    split_comm,
    take_local,
    ulysses_attention,
    usp_attention,
)
from minipar.model import plain_attention
from tests.strategies import seeds, world_sizes

ATTENTIONS = ("ring", "all_gather", "ulysses", "usp")


class Case(NamedTuple):
    """Attention of one sequence, split."""

    attention: str
    size: int
    layout: str = "contiguous"
    causal: bool = True
    seq_len: int = 16
    batch: int = 1
    num_heads: int = 4
    group: int = 1
    head_dim: int = 4
    impl: str = "auto"
    ulysses_size: int = 1
    lengths: tuple[int, ...] = ()  # of documents; none: the whole sequence is one
    per_sample: bool = False  # positions [B, T]
    padding: int = 0  # how many tokens at the end are padding
    seed: int = 0
    options: tuple = ()

    def qkv(self, dtype=torch.float64) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.num_heads, self.num_heads // self.group, self.num_heads // self.group
        return [
            torch.randn(self.batch, self.seq_len, h, self.head_dim, generator=generator)
            .to(dtype)
            .transpose(1, 2)
            for h in heads
        ]

    def positions(self) -> torch.Tensor | None:
        if not self.lengths:
            return None
        positions = document_positions(self.lengths)
        return positions.expand(self.batch, -1) if self.per_sample else positions

    def local(self, x: torch.Tensor, rank: int, dim: int = 2) -> torch.Tensor:
        return take_local(x, rank, self.size, self.layout, dim, self.ulysses_size)

    def local_positions(self, rank: int) -> torch.Tensor | None:
        positions = self.positions()
        return None if positions is None else self.local(positions, rank, dim=positions.dim() - 1)

    def split(self, comm, q, k, v) -> torch.Tensor:
        """This rank's output, from this rank's q, k and v."""
        function = {
            "ring": ring_attention,
            "all_gather": all_gather_attention,
            "ulysses": ulysses_attention,
            "usp": usp_attention,
        }[self.attention]
        comms = split_comm(comm, self.ulysses_size) if self.attention == "usp" else (comm,)
        end = self.seq_len - self.padding if self.padding else None
        common = dict(
            layout=self.layout, positions=self.local_positions(comm.rank), seq_len=end, impl=self.impl
        )
        return function(*comms, q, k, v, self.causal, **common, **dict(self.options))

    def whole(self, q, k, v) -> torch.Tensor:
        """What one process computes, by the definition; padding cut off, its queries' outputs zero."""
        real = self.seq_len - self.padding
        positions = self.positions()
        positions = positions if positions is None else positions[..., :real]
        out = plain_attention(*(x[:, :, :real] for x in (q, k, v)), self.causal, positions)
        return torch.nn.functional.pad(out, (0, 0, 0, self.padding))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def cases(draw, sizes=world_sizes, attentions=ATTENTIONS, layouts=LAYOUTS):
    attention, size = draw(st.sampled_from(attentions)), draw(sizes)
    layout = draw(st.sampled_from(layouts))
    num_heads, impl = draw(st.integers(1, 6)), draw(st.sampled_from(["tiled", "fused", "auto"]))
    group = draw(st.sampled_from(divisors(num_heads)))
    ulysses_size = draw(st.sampled_from(divisors(size))) if attention == "usp" else 1
    seq_len = length_multiple(size, layout, ulysses_size) * draw(st.integers(1, 3))
    causal = draw(st.booleans())
    lengths = draw(_documents(seq_len)) if causal and draw(st.booleans()) else ()
    options = {"pad": True} if attention in ("ulysses", "usp") else {}
    if attention == "all_gather":
        options["heads_at_once"] = draw(st.sampled_from([None, *divisors(num_heads // group)]))
    return Case(
        attention=attention,
        size=size,
        layout=layout,
        causal=causal,
        seq_len=seq_len,
        batch=draw(st.integers(1, 2)),
        num_heads=num_heads,
        group=group,
        head_dim=draw(st.integers(1, 4)),
        impl="auto" if lengths and impl == "fused" else impl,
        ulysses_size=ulysses_size,
        lengths=lengths,
        per_sample=draw(st.booleans()),
        padding=0 if lengths else draw(st.integers(0, min(3, seq_len - 1))),
        seed=draw(seeds),
        options=tuple(options.items()),
    )


@st.composite
def _documents(draw, total: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=4))) if total > 1 else []
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total]))
