"""Puzzle 3: reduce-scatter and all-gather, the two halves of an all-reduce."""

from __future__ import annotations

from minipar.learn.puzzles.naive_all_reduce import GRADIENT_BYTES, best_seconds, best_sent, gradient, summed
from minipar.learn.puzzles.network import World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    return Job(
        inputs=lambda rank: (gradient(world, rank),),
        wanted=lambda rank: (summed(world, range(rank, rank + 1)), summed(world, range(p))),
        sent=Limit(best_sent(world), best_sent(world), "(p-1)/p of the gradient, twice"),
        seconds=Limit(best_seconds(world), best_seconds(world), "2 (p-1) (alpha + beta n/p)"),
    )


TWO_HALVES = Puzzle(
    name="halves",
    title="Reduce-scatter and all-gather",
    minutes=15,
    lesson="01",
    task="""
An all-reduce has two halves that are useful alone. A **reduce-scatter** leaves chunk r of the sum on rank r. An
**all-gather** brings the chunks of all ranks together on every rank. Sharded training uses the one for gradients and
the other for weights.

Write both. Every rank can reach every other here; each half may send `(p-1)/p` of the gradient, and take no longer than
a ring. A network card sends one message after another, and receives one after another: all the messages to a rank wait
in one queue.
""",
    given=f"A gradient has n = {GRADIENT_BYTES // 10**6} MB.",
    stub="""\
async def program(comm, gradient):
    mine = await reduce_scatter(comm, gradient)  # chunk number comm.rank of the sum
    whole = await all_gather(comm, mine)         # all chunks, in the order of ranks
    return mine, whole


async def reduce_scatter(comm, value):
    raise NotImplementedError


async def all_gather(comm, chunk):
    raise NotImplementedError
""",
    hints=(
        "A ring is not needed: in the reduce-scatter, send each other rank the chunk that it owns.",
        "If all ranks send to rank 0 first, its network card is the queue. Begin with the rank after yours.",
        "All-gather: send your chunk to all the others; sort what arrives by its sender, then join.",
    ),
    answer="""\
async def program(comm, gradient):
    mine = await reduce_scatter(comm, gradient)
    whole = await all_gather(comm, mine)
    return mine, whole


def others(comm):
    return [(comm.rank + step) % comm.size for step in range(1, comm.size)]


async def reduce_scatter(comm, value):
    chunks = value.chunks(comm.size)
    for other in others(comm):
        await comm.send(chunks[other], other)
    total = chunks[comm.rank]
    for other in reversed(others(comm)):
        total = total + await comm.recv(other)
    return total


async def all_gather(comm, chunk):
    chunks = [chunk] * comm.size
    for other in others(comm):
        await comm.send(chunk, other)
    for other in reversed(others(comm)):
        chunks[other] = await comm.recv(other)
    return comm.join(chunks)
""",
    sizes=(4, 3),
    job=job,
    has_collectives=False,
)
