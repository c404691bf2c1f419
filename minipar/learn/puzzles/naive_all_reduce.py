"""Puzzle 1: an all-reduce in which every rank sends its whole gradient to every other rank."""

from __future__ import annotations

from minipar.learn.puzzles.network import World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import Value, parts_of

GRADIENT_BYTES = 120_000_000


def gradient(world: World, rank: int) -> Value:
    """Return a rank's gradient, in as many chunks as there are ranks."""
    p = world.num_ranks
    blocks = [(chunk, parts_of(f"rank {rank}")) for chunk in range(p)]
    return Value(world.memories[rank], "gradient", blocks, GRADIENT_BYTES // p)


def summed(world: World, chunks: range) -> Wanted:
    """Return the expected chunks of the sum of all ranks' gradients."""
    everybody = parts_of(*(f"rank {rank}" for rank in range(world.num_ranks)))
    return Wanted("gradient", tuple((chunk, everybody) for chunk in chunks))


def best_sent(world: World) -> float:
    """Return the bytes that each rank of a ring all-reduce sends."""
    p = world.num_ranks
    return 2 * (p - 1) / p * GRADIENT_BYTES


def best_seconds(world: World) -> float:
    """Return the time of a ring all-reduce, in seconds."""
    p = world.num_ranks
    return 2 * (p - 1) * world.network.seconds(GRADIENT_BYTES // p, 0, 1)


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    return Job(
        inputs=lambda rank: (gradient(world, rank),),
        wanted=lambda rank: summed(world, range(p)),
        sent=Limit((p - 1) * GRADIENT_BYTES, best_sent(world), "2 (p-1)/p of the gradient, by a ring"),
        seconds=Limit(
            2 * (p - 1) * world.network.seconds(GRADIENT_BYTES, 0, 1),
            best_seconds(world),
            "2 (p-1) (alpha + beta n/p), by a ring",
        ),
    )


NAIVE_ALL_REDUCE = Puzzle(
    name="naive",
    title="All-reduce, naive",
    minutes=5,
    lesson="00",
    task="""
Every rank has a gradient of its own, and every rank needs the **sum of all of them**. How it gets there is up to you,
as long as it is right: no rank's part may be missing, and none may come twice.

The program below runs on every rank at the same time; `comm.rank` tells them apart. Return the sum.
""",
    given=f"A gradient has n = {GRADIENT_BYTES // 10**6} MB.",
    stub="""\
async def program(comm, gradient):
    # comm.rank, comm.size              which rank this is, of how many
    # await comm.send(value, to)        sends a value to rank `to`, and goes on at once
    # value = await comm.recv(source)   waits for the next message from rank `source`
    # a + b                             adds two values
    raise NotImplementedError
""",
    hints=(
        "Two loops: first send the gradient to each of the other ranks, then receive from each of them.",
        "Who receives before anybody has sent waits for ever; `send` never waits.",
        "`total = gradient`, and then `total = total + await comm.recv(other)` for each other rank.",
    ),
    answer="""\
async def program(comm, gradient):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for other in others:
        await comm.send(gradient, other)
    total = gradient
    for other in others:
        total = total + await comm.recv(other)
    return total
""",
    sizes=(4, 3),
    job=job,
    has_collectives=False,
)
