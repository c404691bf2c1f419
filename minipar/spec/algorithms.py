"""Specifications of a shift, and of all-reduces by a given algorithm: in place, by halving and doubling, in two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.traffic import Traffic
from minipar.spec.collectives import (
    MANY,
    recording_peers,
    right,
    ring_bytes,
    runs,
    same_bits,
    varied,
    whose_part,
)
from minipar.spec.counted import counted
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Body, Specification, Stage
from minipar.spec.words import first, wrong_bytes
from minipar.support.live_bytes import LiveBytes


def _one_message(world: Comm, shift: Implementation) -> str | None:
    x = torch.ones(1000)
    with counted(world) as sent:
        shift(world, x)
    words = wrong_bytes(sent, x.nbytes, world.size, f"{len(x)} float32", "a shift")
    return words or (None if sent.messages == 1 else f"it sent {sent.messages} messages, not one")


# All-reduces --------------------------------------------------------------------------------------------------------


def _returning_x(world: Comm, all_reduce_: Implementation, body: Body) -> str | None:
    """Run `body` on an all-reduce that copies x, calls the in-place `all_reduce_` on the copy, and returns it."""
    found = []

    def pure(comm: Comm, x: Tensor) -> Tensor:
        mine = x.clone()
        got = all_reduce_(comm, mine)
        if not isinstance(got, Tensor) or got.data_ptr() != mine.data_ptr():
            kind = "another tensor than x" if isinstance(got, Tensor) else f"a {type(got).__name__}, not x"
            found.append(f"it returned {kind}, which holds the sum")
        return mine

    return body(world, pure) or first(found)


def _one_chunk_of_scratch(world: Comm, all_reduce_: Implementation) -> str | None:
    x = torch.ones(12 * 4096, dtype=torch.float64)
    all_reduce_(world, torch.ones(12 * 4096, dtype=torch.float64))  # warm up: a Comm may keep scratch memory
    with LiveBytes() as live:
        all_reduce_(world, x)
    chunk = x.nbytes // world.size
    if live.peak > 1.5 * chunk:
        return (
            f"{live.peak} bytes were allocated at once, {live.peak / chunk:.2g} chunks of x; "
            "receiving takes one"
        )
    return None


def halving_bytes(num_bytes: int, size: int, rank: int) -> float:
    """Return the bytes that a rank sends by halving and doubling, if 2^floor(log2 p) divides the length."""
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        return num_bytes
    return 2 * (core - 1) / core * num_bytes + (num_bytes if rank + core < size else 0)


def _few_messages(world: Comm, all_reduce: Implementation) -> str | None:
    p, r, x = world.size, world.rank, torch.ones(24, dtype=torch.float64)
    core = 1 << (p.bit_length() - 1)
    most = 1 if r >= core else 2 * (core.bit_length() - 1) + (r + core < p)
    with counted(world) as sent:
        all_reduce(world, x)
    if sent.messages > most:
        return f"with {p} ranks it sent {sent.messages} messages; halving and doubling sends {most}"
    return wrong_bytes(sent, halving_bytes(x.nbytes, p, r), p, "24 float64", "halving and doubling")


def _by_nodes(world: Comm, hierarchical: Implementation, body: Body) -> str | None:
    sizes = [g for g in range(1, world.size + 1) if world.size % g == 0]
    return first([body(world, partial(hierarchical, node_size=g)) for g in sizes])


def _bytes_that_leave(world: Comm, hierarchical: Implementation) -> str | None:
    g, x = 2, torch.ones(24, dtype=torch.float64)
    k = world.size // g
    with recording_peers(world) as sent:
        hierarchical(world, x, node_size=g)
    leave = sum(n for peer, n in sent.items() if peer // g != world.rank // g)
    formula = 2 * (k - 1) / k * x.nbytes / g
    if leave != formula:
        return (
            f"with {k} nodes of {g} ranks {leave} of {x.nbytes} bytes left its node; an all-reduce "
            f"of its own chunk across nodes sends {formula:g}"
        )
    inside = Traffic()
    inside.book("inside its node", sum(sent.values()) - leave)
    return wrong_bytes(inside, 2 * (g - 1) / g * x.nbytes, world.size, "24 float64", "a ring")


def _refuses(world: Comm, hierarchical: Implementation) -> str | None:
    try:
        hierarchical(world, torch.ones(6), node_size=2)
    except ValueError:
        return None
    return f"nodes of 2 do not divide {world.size} ranks; raise a ValueError that says so"


def _all_reduce(
    name: str,
    signature: str,
    says: str,
    over: Callable[[Body], Body],
    small: tuple[int, ...],
    measured: Sequence[Stage],
    writes: tuple[int, ...] = (),
) -> Specification:
    """over(body): the body, of an implementation that is called in its own way."""
    stages = (
        Stage("runs", over(partial(runs, collective="all_reduce")), (1, 2), writes),
        Stage("small", over(partial(whose_part, collective="all_reduce")), small, writes),
        Stage("drawn", over(partial(right, collective="all_reduce")), writes=writes),
        *measured,
        Stage("order", over(same_bits), (3, 4), writes),
        Stage("varied", over(partial(varied, collective="all_reduce")), MANY, writes),
    )
    return Specification(name, signature, says, stages)


SPECIFICATIONS = [
    Specification(
        "shift",
        "shift(comm, x)",
        "Every rank sends x to the next rank, the last to the first, and returns what it got.",
        (
            Stage("runs", partial(runs, collective="shift"), (2, 3, 1)),
            Stage("small", partial(whose_part, collective="shift"), (2, 3)),
            Stage("drawn", partial(right, collective="shift")),
            Stage("bytes", _one_message, (2, 4)),
            Stage("varied", partial(varied, collective="shift"), MANY),
        ),
    ),
    _all_reduce(
        "all_reduce_",
        "all_reduce_(comm, x)",
        "x becomes the sum over ranks of x, on every rank the same bits, with one chunk of scratch memory.",
        lambda body: partial(_returning_x, body=body),
        (2, 3),
        [
            Stage("bytes", partial(ring_bytes, collective="all_reduce"), (3, 4), (1,)),
            Stage("memory", _one_chunk_of_scratch, (3, 4)),
        ],
        (1,),
    ),
    _all_reduce(
        "halving_doubling",
        "all_reduce(comm, x)",
        "The sum over ranks of x, in 2 log2 p messages; ranks beyond a power of two fold in first, and out at the end.",
        lambda body: body,
        (2, 4),
        [Stage("bytes", _few_messages, (2, 3, 4, 6, 7))],
    ),
    _all_reduce(
        "hierarchical",
        "hierarchical(comm, x, node_size)",
        "The sum over ranks of x; of each rank's bytes only an all-reduce of a node_size-th part leaves the node.",
        lambda body: partial(_by_nodes, body=body),
        (4,),
        [Stage("bytes", _bytes_that_leave, (4,)), Stage("refusals", _refuses, (3,))],
    ),
]
