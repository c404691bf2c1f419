"""Puzzle 2: the ring all-reduce."""

from __future__ import annotations

from minipar.learn.puzzles.naive_all_reduce import GRADIENT_BYTES, best_seconds, best_sent, gradient, summed
from minipar.learn.puzzles.network import Network, World
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle

SENT, SECONDS = "2 (p-1)/p of the gradient", "2 (p-1) (alpha + beta n/p)"


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    return Job(
        inputs=lambda rank: (gradient(world, rank),),
        wanted=lambda rank: summed(world, range(world.num_ranks)),
        sent=Limit(best_sent(world), best_sent(world), SENT),
        seconds=Limit(best_seconds(world), best_seconds(world), SECONDS),
    )


RING_ALL_REDUCE = Puzzle(
    name="ring",
    title="All-reduce, as a ring",
    minutes=20,
    lesson="01",
    task="""
The same sum, but now the ranks stand in a **ring**: a rank can send to the next one only, `(comm.rank + 1) %
comm.size`. And each rank may send no more than `2 (p-1)/p` of the gradient's bytes, whatever p is. Passing whole
gradients on costs `p-1` of them.

Cut the gradient into p chunks. In the first half of the way, let each chunk travel round once and collect every
rank's part; in the second half, let the finished chunks travel on to everybody.
""",
    given=f"A gradient has n = {GRADIENT_BYTES // 10**6} MB.",
    stub="""\
async def program(comm, gradient):
    # gradient.chunks(n)    a list of n equal chunks
    # comm.join(chunks)     puts a list of chunks together, in the order given
    p, after, before = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunks = gradient.chunks(p)
    raise NotImplementedError
""",
    hints=(
        "In step s of the first half, rank r sends chunk r - s (modulo p), and adds what it receives to "
        "chunk r - s - 1.",
        "After p - 1 steps, rank r has chunk r + 1 whole. The second half sends that one first.",
        "In step s of the second half, rank r sends chunk r + 1 - s, and what it receives replaces chunk r - s.",
    ),
    answer="""\
async def program(comm, gradient):
    p, after, before = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunks = gradient.chunks(p)
    for step in range(p - 1):
        mine, theirs = (comm.rank - step) % p, (comm.rank - step - 1) % p
        await comm.send(chunks[mine], after)
        chunks[theirs] = chunks[theirs] + await comm.recv(before)
    for step in range(p - 1):
        mine, theirs = (comm.rank + 1 - step) % p, (comm.rank - step) % p
        await comm.send(chunks[mine], after)
        chunks[theirs] = await comm.recv(before)
    return comm.join(chunks)
""",
    sizes=(4, 5, 2),
    job=job,
    network=lambda num_ranks: Network(is_ring=True),
    has_collectives=False,
)
