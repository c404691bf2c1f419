"""Puzzle 9: ring attention, where keys and values travel while queries stay."""

from __future__ import annotations

from typing import Any

from minipar.learn.puzzles.network import Call, Steps, World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import Fault, Value, name_of, parts_of, same_rank

Q_BYTES, KV_BYTES = 50_000_000, 100_000_000
ATTEND_S = 3e-3


def attend_of(world: World, rank: int) -> Any:
    """Return `attend(state, q, kv)`, which merges one more block of keys and values into the state, by log-sum-exp."""

    def attend(state: Any, q: Any, kv: Any) -> Call:
        def steps() -> Steps:
            if (
                not isinstance(q, Value)
                or not isinstance(kv, Value)
                or q.of != f"queries of rank {rank}"
                or not kv.of.startswith("keys and values")
            ):
                raise Fault(
                    f"attend is given {name_of(q)} and {name_of(kv)}; it takes this rank's queries, and keys and values"
                )
            if state is not None and (not isinstance(state, Value) or state.of != "output"):
                raise Fault(
                    f"attend is given {name_of(state)} as its first argument, which is None at first, and then what "
                    "attend returned"
                )
            same_rank(q, kv)
            block = parts_of(f"the {kv.of}")
            yield from world.comms[rank].compute(ATTEND_S, ("F", kv.about[0])).__await__()
            one = Value(world.memories[rank], "output", [(0, block)], Q_BYTES, (rank,))
            return one if state is None else state + one

        return Call(world, rank, "attend", steps)

    return attend


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    sent, seconds = (p - 1) * KV_BYTES, p * ATTEND_S
    held = 2 * Q_BYTES + KV_BYTES
    everything = parts_of(*(f"the keys and values of rank {rank}" for rank in range(p)))

    def inputs(rank: int) -> tuple[Any, ...]:
        memory = world.memories[rank]
        q = Value(memory, f"queries of rank {rank}", [(0, parts_of(f"rank {rank}"))], Q_BYTES)
        kv = Value(
            memory, f"keys and values of rank {rank}", [(0, parts_of(f"rank {rank}"))], KV_BYTES, (rank,)
        )
        return q, kv, attend_of(world, rank)

    return Job(
        inputs=inputs,
        wanted=lambda rank: Wanted("output", ((0, everything),)),
        sent=Limit(sent, sent, "p - 1 blocks of keys and values"),
        seconds=Limit(seconds, seconds, "p times attend: every message hidden behind it"),
        memory=(Limit(held + KV_BYTES, held, "queries, output, and one block of keys and values"),) * p,
    )


RING_ATTENTION = Puzzle(
    name="ring-attention",
    title="Ring attention",
    minutes=15,
    lesson="09",
    task="""
Context parallelism: a long sequence lies in blocks over the ranks, and each block's **queries must meet all keys and
values**. Queries stay; blocks of keys and values travel round a ring, and each rank merges one block after another
into its output (attention is not causal here, so every block counts).

A rank may hold two blocks of keys and values at once, not all p of them. And the time is limited to p times attend: a
block travels faster than attend computes, so messages cost nothing if they travel meanwhile.
""",
    given=f"attend takes {ATTEND_S * 1e3:g} ms. Queries and output have {Q_BYTES // 10**6} MB each, a block of keys and "
    f"values {KV_BYTES // 10**6} MB, which travels in 2 ms.",
    stub="""\
async def program(comm, q, kv, attend):
    # output = await attend(None, q, kv)      the first block
    # output = await attend(output, q, kv)    one more block, merged
    raise NotImplementedError
""",
    hints=(
        "p times attend; between two of them, the block in hand goes to the next rank and another comes from "
        "the one before.",
        "`send` goes on at once: send the block before attend, receive the next after it.",
        "The last block of the loop need not be sent on: that would be a message that nobody receives.",
    ),
    answer="""\
async def program(comm, q, kv, attend):
    p, output = comm.size, None
    for step in range(p):
        if step < p - 1:
            await comm.send(kv, (comm.rank + 1) % p)
        output = await attend(output, q, kv)
        if step < p - 1:
            kv = await comm.recv((comm.rank - 1) % p)
    return output
""",
    sizes=(4, 3, 2),
    job=job,
)
