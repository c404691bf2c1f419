"""Faults planted in the library's inference engine. Each makes one small, common mistake."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from minipar.inference import prefix
from minipar.inference.blocks import BlockMemory, BlockPool, Pass, Rows
from minipar.inference.engine import Engine
from minipar.inference.scheduler import Plan, Scheduler, Sequence
from minipar.learn.museum.exhibit import Change


def block_freed_twice(change: Change) -> None:
    """Two code paths release a finished request's blocks, and the pool never checks whether a block has a holder."""
    remove = Scheduler.remove

    def release(pool: BlockPool, block: int) -> None:
        pool.holders[block] = max(0, pool.holders[block] - 1)
        if pool.holders[block] == 0:
            pool._free.append(block)

    def remove_twice(scheduler: Scheduler, sequence: Sequence) -> None:
        for block in sequence.table:
            scheduler.pool.release(block)
        remove(scheduler, sequence)

    change(BlockPool, "release", release)
    change(BlockPool, "require_writable", lambda pool, block: None)
    change(Scheduler, "remove", remove_twice)


def hash_without_parent(change: Change) -> None:
    """A block's key is a hash of its own tokens only, without the tokens before them."""
    key = prefix.block_key
    change(prefix, "block_key", lambda parent, tokens: key(prefix.ROOT, tokens))


def decodes_count_tokens_read(change: Change) -> None:
    """Decodes use the number of processed tokens as position, which counts tokens twice that a preemption recomputed."""
    read, of = Engine._read, Pass.of
    twice: dict[int, int] = {}  # id of a block table -> number of its request's tokens that were recomputed

    def noting(engine: Engine, plan: Plan) -> Any:
        twice.clear()
        twice.update({id(r.sequence.table): r.sequence.num_served - r.sequence.num_read for r in plan.reads})
        return read(engine, plan)

    def counted(requests: Items[Rows], *where: Any) -> Pass:
        right = of(requests, *where)
        ahead = [twice[id(r.table)] if len(r.tokens) == 1 else 0 for r in requests for _ in r.tokens]
        return right._replace(positions=right.positions + torch.tensor(ahead)[:, None])

    change(Engine, "_read", noting)
    change(Pass, "of", counted)


def heads_dealt_in_turn(change: Change) -> None:
    """The receiver of a cache assumes that heads are assigned to two ranks in turn: 0, 2, 1, 3 instead of 0, 1, 2, 3."""
    load = BlockMemory.load

    def permuted(memory: BlockMemory, table: Tensor, saved: list[Tensor]) -> None:
        load(memory, table, [x.unflatten(3, (2, -1)).transpose(3, 4).flatten(3, 4) for x in saved])

    change(BlockMemory, "load", permuted)
