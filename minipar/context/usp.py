"""USP: Ulysses inside a node, where an all-to-all is cheap, and ring attention across nodes, where it is not.

P = R * U ranks: neighbouring ranks form R groups of U. A group holds the tokens that one rank of a ring of R would hold,
and each of its ranks a contiguous piece of them. The all-to-all inside the group gives each rank all of the group's tokens
for H/U of the heads; ring attention then runs over the R ranks, one of each group, that have the same heads.

The number of heads limits only U, so there can be more ranks than heads. Each ring sends 1/U of the heads, so ring traffic
shrinks by U, at the cost of the all-to-alls inside nodes.

    forward    sends what Ulysses sends over U ranks with N/R tokens, plus what a ring sends over R ranks with h_kv/U, where
               h_kv is as in `ulysses.py`. If a rank's queries do not share its key/value heads evenly, the ring sends h/U
               instead, because key/value heads are then repeated for each query head

Source: arXiv:2405.07719, section 3.
"""

from __future__ import annotations

from torch import Tensor

from minipar.comm import Comm
from minipar.context.attention_ring import ring_attention
from minipar.context.ulysses import exchange_heads
from minipar.support.errors import require_divides


def usp_attention(
    ring_comm: Comm,
    ulysses_comm: Comm,
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
    """Compute this rank's part of attention over a split sequence; arguments as in `ring_attention`, `ulysses_attention`.

    ulysses_comm  the U ranks of this rank's group
    ring_comm     the R ranks with the same index in their groups as this rank, in the order of the groups

    The tokens of each rank are `local_positions(N, rank, R * U, layout, ulysses_size=U)`.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        return ring_attention(ring_comm, q, k, v, causal, layout, positions, seq_len, impl)

    return exchange_heads(ulysses_comm, q, k, v, attend, positions, pad=pad)


def split_comm(comm: Comm, ulysses_size: int) -> tuple[Comm, Comm]:
    """Return (ring_comm, ulysses_comm) for groups of `ulysses_size` neighbouring ranks.

    Raises ValueError if ulysses_size does not divide the number of ranks.
    """
    require_divides("ulysses_size", ulysses_size, "cp", comm.size)
    first = comm.rank - comm.rank % ulysses_size
    group = range(first, first + ulysses_size)
    same_index = range(comm.rank % ulysses_size, comm.size, ulysses_size)
    return comm.subgroup(same_index, "ring"), comm.subgroup(group, "ulysses")
