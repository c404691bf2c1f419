"""Collectives recorded on real ranks: every message that the library sent, and which ranks' parts of which chunks it held.

The elements of a vector show which parts have been summed: chunk c of rank r has a one at (c, r), so the nonzero elements
of a message are the parts that it carries.
"""

from __future__ import annotations

import json
from math import lcm

import torch

from minipar.runtime.launch import run

# label -> (collective, algorithm)
RECORDED = {
    "all-reduce, ring": ("all_reduce", "ring"),
    "all-reduce, halving and doubling": ("all_reduce", "halving_doubling"),
    "all-reduce, doubling": ("all_reduce", "doubling"),
    "all-reduce, tree": ("all_reduce", "tree"),
    "all-reduce, double tree": ("all_reduce", "double_tree"),
    "all-reduce, two levels (nodes of 2)": ("all_reduce", "hierarchical"),
    "reduce-scatter, ring": ("reduce_scatter", "ring"),
    "all-gather, ring": ("all_gather", "ring"),
    "broadcast, tree": ("broadcast", "tree"),
    "all-to-all, pairwise": ("all_to_all", None),
}
SIZES = range(2, 9)
NODE = 2  # ranks per node, for algorithms in two levels


def sizes_of(label: str) -> list[int]:
    """Return the numbers of ranks that a collective is recorded with."""
    levels = "two levels" in label
    return [p for p in SIZES if not levels or (p % NODE == 0 and p > NODE)]


def recordings() -> dict:
    """Return label -> number of ranks -> recording."""
    return {label: {p: record(label, p) for p in sizes_of(label)} for label in RECORDED}


def record(label: str, p: int) -> dict:
    """Run one collective on p ranks; return what each rank begins with, and the messages by step.

    chunks  number of chunks of the vector
    start   start[rank]: the [chunk, part] pairs that the rank has at first; a part is the number of a rank
    steps   steps[i]: messages {"from", "to", "items": [chunk, part], "share": of the whole vector}
    """
    posts = run(_recorded, *RECORDED[label], world_size=p)
    chunks, start = posts[0][0], [own[1] for own in posts]
    step_of = _steps([own[2] for own in posts])
    steps: list[list[dict]] = [[] for _ in range(max(step_of.values(), default=0))]
    for rank, (_, _, events) in enumerate(posts):
        for number, event in enumerate(events):
            if event["to"] is not None:
                message = {"from": rank, "to": event["to"], "items": event["items"], "share": event["share"]}
                steps[step_of[rank, number] - 1].append(message)
    return {"p": p, "chunks": chunks, "start": start, "steps": steps}


def _steps(events: list[list[dict]]) -> dict[tuple[int, int], int]:
    """Return the step of each message that each rank posts: one later than all messages that it posted before."""
    arrivals = {}  # (source, to, n) -> the post of the receiver
    for rank, own in enumerate(events):
        count: dict[int, int] = {}
        for number, event in enumerate(own):
            if event["source"] is not None:
                n = count[event["source"]] = count.get(event["source"], -1) + 1
                arrivals[event["source"], rank, n] = (rank, number)
    step = {(rank, number): 1 for rank, own in enumerate(events) for number in range(len(own))}
    changed = True
    while changed:
        changed = False
        for rank, own in enumerate(events):
            count, before = {}, 0
            for number, event in enumerate(own):
                at = max(step[rank, number], before + 1)
                if event["to"] is not None:
                    n = count[event["to"]] = count.get(event["to"], -1) + 1
                    other = arrivals[rank, event["to"], n]
                    at = max(at, step[other]) if other != (rank, number) else at
                    if step[other] < at:
                        step[other], changed = at, True
                if step[rank, number] != at:
                    step[rank, number], changed = at, True
                before = at
    return step


def _recorded(world, collective: str, algorithm: str | None):
    p, core = world.size, 1 << (world.size.bit_length() - 1)
    # The numbers of pieces, besides p, into which an algorithm cuts the vector: no chunk may lie in two pieces.
    pieces = {"halving_doubling": core, "double_tree": 2}.get(algorithm, 1)
    chunks = 1 if collective == "broadcast" else lcm(p, pieces)
    comm, events = world.using(algorithm) if algorithm else world, []
    transport = comm._transport
    transport.node_size = NODE
    post = transport.post

    def items(x: torch.Tensor) -> list[list[int]]:
        rows = x.detach().reshape(-1, chunks, p)
        return [[c, r] for c, r in rows.sum(0).nonzero().tolist()]

    def recording(channel, kind, x, to, out, source, traffic):
        ranks = channel.key.ranks
        events.append(
            {
                "to": None if to is None or not x.numel() else ranks[to],
                "source": None if source is None or not out.numel() else ranks[source],
                "items": [] if to is None else items(x),
                "share": 0 if to is None else x.numel() / (chunks * chunks * p),
            }
        )
        return post(channel, kind, x, to, out, source, traffic)

    x = torch.zeros(chunks, chunks, p)
    x[range(chunks), range(chunks), world.rank] = 1
    mine = {"all_gather": x[world.rank : world.rank + 1], "broadcast": x * (world.rank == 0)}.get(
        collective, x
    )
    transport.post = recording
    try:
        call = getattr(comm, collective)
        call(mine.reshape(len(mine), -1), 0) if collective == "broadcast" else call(
            mine.reshape(len(mine), -1)
        )
    finally:
        del transport.post
        transport.node_size = None
    return chunks, items(mine), events


if __name__ == "__main__":
    print(json.dumps(recordings()))
