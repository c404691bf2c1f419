"""Sends the KV cache of a request from the prefill ranks to the decode ranks, whose tp may differ.

Each rank of a side holds whole key/value heads: h_kv / tp of them, or, if tp exceeds h_kv, a copy of one head. A decode
rank gets each of its heads once, from one of the prefill ranks that have it:

    prefill tp = 2          decode tp = 4                 decode tp = 1
    rank 0: heads 0 1  ->   rank 0: head 0, rank 1: 1     rank 0: heads 0 1 2 3
    rank 1: heads 2 3  ->   rank 2: head 2, rank 3: 3

A request's blocks may have different numbers on the two sides: its tokens are sent in order, without the unused end of the
last block.

Source: DistServe, arXiv:2401.09670 (prefill and decode on different GPUs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.stream import Pending
from minipar.inference.blocks import blocks_for
from minipar.inference.paged_model import PagedModel


class Transfer(NamedTuple):
    """Heads that a prefill rank sends to a decode rank; ranks are numbered within their own side."""

    source: int
    destination: int
    heads: range


def heads_of(rank: int, tp: int, num_kv_heads: int) -> range:
    """Return the key/value heads that a tp rank holds. Raises ValueError unless one of tp and h_kv divides the other."""
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(f"tp={tp} and num_kv_heads={num_kv_heads}; use a tp of which one divides the other")
    count = max(1, num_kv_heads // tp)
    first = rank * num_kv_heads // tp
    return range(first, first + count)


def transfers(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[Transfer]:
    """Return which heads each prefill rank sends to each decode rank; a decode rank gets each of its heads once."""
    found = []
    for destination in range(decode_tp):
        needed, sent = heads_of(destination, decode_tp, num_kv_heads), set[int]()
        # Where prefill ranks hold copies of a head, decode ranks start their search at different ranks to use all copies.
        for i in range(prefill_tp):
            source = (destination * prefill_tp // decode_tp + i) % prefill_tp
            held = heads_of(source, prefill_tp, num_kv_heads)
            heads = range(max(needed.start, held.start), min(needed.stop, held.stop))
            if heads and heads.start not in sent:
                found.append(Transfer(source, destination, heads))
                sent.update(heads)
    return found


def send_cache(
    comm: Comm, prefill_tp: int, paged: PagedModel, table: Sequence[int], num_tokens: int
) -> list[Pending]:
    """On a prefill rank, start to send the first S tokens of a request; return the handles of the messages.

    comm   prefill_tp prefill ranks, then the decode ranks, each of which calls `recv_cache`
    table  the request's blocks on this rank

    Each message is [L, 2, S, heads, head_dim]. All messages together have 2 L h_kv d e bytes per token, times the number of
    copies of each head on the decode side.
    """
    decode_tp, num_kv_heads = comm.size - prefill_tp, paged.model.config.num_kv_heads
    here, b = heads_of(comm.rank, prefill_tp, num_kv_heads), paged.pool.block_size
    tokens = torch.arange(num_tokens, device=paged.device)
    slots = torch.tensor(table, device=paged.device)[tokens // b] * b + tokens % b
    pending = []
    for source, destination, heads in transfers(prefill_tp, decode_tp, num_kv_heads):
        if source == comm.rank:
            local = slice(heads.start - here.start, heads.stop - here.start)
            own = [memory.data.flatten(1, 2)[:, slots, local] for memory in paged.memories]
            pending.append(comm.send(torch.stack(own), prefill_tp + destination, async_op=True))
    return pending


def recv_cache(comm: Comm, prefill_tp: int, paged: PagedModel, num_tokens: int) -> list[list[Tensor]]:
    """On a decode rank, receive the first S tokens of a request, in blocks of this rank's size, for `PagedModel.load`."""
    decode_tp, num_kv_heads = comm.size - prefill_tp, paged.model.config.num_kv_heads
    here, b = heads_of(comm.rank - prefill_tp, decode_tp, num_kv_heads), paged.pool.block_size
    data, num_blocks = paged.memories[0].data, blocks_for(num_tokens, b)
    received = data.new_zeros(len(paged.memories), 2, num_blocks * b, len(here), data.shape[-1])
    for source, destination, heads in transfers(prefill_tp, decode_tp, num_kv_heads):
        if destination == comm.rank - prefill_tp:
            local = slice(heads.start - here.start, heads.stop - here.start)
            shape = len(paged.memories), 2, num_tokens, len(heads), data.shape[-1]
            received[:, :, :num_tokens, local] = comm.recv(shape, data.dtype, source)
    return [[layer.unflatten(1, (num_blocks, b))] for layer in received]
