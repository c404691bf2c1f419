"""Install each dispatch in an MoE layer whose experts are sharded."""

from __future__ import annotations

from minipar.comm import Comm
from minipar.extras.experts.choices import BalanceOptions, ChunkOptions, ShadowOptions
from minipar.extras.experts.chunked_rows import ChunkedAllToAll
from minipar.extras.experts.moved_experts import PlacedAllToAll
from minipar.extras.experts.shadowed_experts import ShadowedAllToAll
from minipar.model.moe import MoE


def in_chunks(moe: MoE, ep: Comm, overlap: bool, options: ChunkOptions) -> None:
    """Install the dispatch that sends rows in chunks."""
    moe.overrides.dispatch = ChunkedAllToAll(ep, options.chunks, options.node_size)
    moe.overrides.pad_to_capacity = True


def shadow(moe: MoE, ep: Comm, overlap: bool, options: ShadowOptions) -> None:
    """Install the dispatch that replicates hot experts."""
    moe.overrides.dispatch = ShadowedAllToAll(ep, options.rows, overlap, options.node_size)


def balance(moe: MoE, ep: Comm, overlap: bool, options: BalanceOptions) -> None:
    """Install the dispatch to experts that are moved by load."""
    moe.overrides.dispatch = PlacedAllToAll(ep, moe.options.num_experts, overlap, options.node_size)
