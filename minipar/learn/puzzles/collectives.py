"""The collectives that later puzzles provide as `comm.all_reduce` and so on. Each is a ring of sends and receives."""

from __future__ import annotations

from minipar.learn.puzzles.network import Comm
from minipar.learn.puzzles.values import Value

Group = tuple[int, ...]


async def reduce_scatter(comm: Comm, value: Value, group: Group, tag: object) -> Value:
    """Return chunk i of the sum on the group's i-th rank, in new memory."""
    p, mine = len(group), group.index(comm.rank)
    chunks = value.chunks(p)
    total = chunks[(mine - 1) % p] if p > 1 else value * 1
    for step in range(1, p):
        await comm.send(total, group[(mine + 1) % p], tag)
        total = await comm.recv(group[mine - 1], tag) + chunks[(mine - 1 - step) % p]
    return total


async def all_gather(comm: Comm, value: Value, group: Group, tag: object) -> Value:
    """Return the chunks of the group's ranks, joined in the order of the group."""
    p, mine = len(group), group.index(comm.rank)
    chunks = [value] * p
    passing = value
    for step in range(1, p):
        await comm.send(passing, group[(mine + 1) % p], tag)
        passing = chunks[(mine - step) % p] = await comm.recv(group[mine - 1], tag)
    return comm.join(chunks)


async def all_reduce(comm: Comm, value: Value, group: Group, tag: object) -> Value:
    """Return the sum over the group's ranks: reduce-scatter, then all-gather."""
    chunk = await reduce_scatter(comm, value, group, tag)
    return await all_gather(comm, chunk, group, tag)
