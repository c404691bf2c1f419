"""Specifications of a shift, and of all-reduces by a given algorithm: in place, by halving and doubling, in two levels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.messages import Channel
from minipar.spec.collectives import SHAPES, calls_of, same_bits, varied, whose_part, wrong
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Body, Specification, Stage, on_ranks
from minipar.spec.words import first, generator, mismatch, wrong_bytes
from minipar.support.live_bytes import LiveBytes


def _shift(world: Comm, shift: Implementation, shapes: Sequence[tuple[int, ...]] = SHAPES) -> str | None:
    return first([_shift_one(world, shift, shape) for shape in shapes])


def _shift_one(world: Comm, shift: Implementation, shape: tuple[int, ...]) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, *shape)
    xs = [torch.randint(-4, 5, shape, generator=draw).double() for _ in range(p)]
    x = xs[r].clone()
    got = shift(world, x)
    if words := mismatch(f"rank {r}: what came from the left, {list(shape)},", got, xs[r - 1]):
        owner = [s for s in range(p) if mismatch("", got, xs[s]) is None]
        return f"{words}: it has rank {owner[0]}'s" if owner else words
    if not torch.equal(x, xs[r]):
        return f"rank {r}: its x was written to: send it, and receive into another tensor"
    return None


def _returns(world: Comm, function: Implementation) -> str | None:
    got = function(world, torch.ones(4))
    kind = type(got).__name__
    return None if isinstance(got, Tensor) else f"rank {world.rank}: it returned a {kind}, not a tensor"


def _one_message(world: Comm, shift: Implementation) -> str | None:
    x = torch.ones(1000)
    world.traffic.reset()
    shift(world, x)
    sent, messages = world.traffic.sent_bytes, world.traffic.messages
    words = wrong_bytes(sent, x.nbytes, world.rank, world.size, f"{len(x)} float32", "a shift")
    return words or (None if messages == 1 else f"rank {world.rank}: it sent {messages} messages, not one")


# All-reduces --------------------------------------------------------------------------------------------------------


def _returning_x(world: Comm, all_reduce_: Implementation, body: Body) -> str | None:
    """Run `body` on an all-reduce that copies x, calls the in-place `all_reduce_` on the copy, and returns it."""
    found = []

    def pure(comm: Comm, x: Tensor) -> Tensor:
        mine = x.clone()
        got = all_reduce_(comm, mine)
        if not isinstance(got, Tensor) or got.data_ptr() != mine.data_ptr():
            kind = "another tensor than x" if isinstance(got, Tensor) else f"a {type(got).__name__}, not x"
            found.append(f"rank {comm.rank}: it returned {kind}, which holds the sum")
        return mine

    return body(world, pure) or first(found)


def _right_sum(world: Comm, all_reduce: Implementation) -> str | None:
    return first([wrong(world, all_reduce, call) for call in calls_of("all_reduce", world.size)])


def _varied_sum(world: Comm, all_reduce: Implementation) -> str | None:
    return varied(world, all_reduce, "all_reduce")


def _sum_of_parts(world: Comm, all_reduce: Implementation) -> str | None:
    return whose_part(world, all_reduce, "all_reduce")


def _ring_bytes(world: Comm, all_reduce_: Implementation) -> str | None:
    for call in calls_of("all_reduce", world.size):
        x = call.inputs(world.size)[world.rank]
        formula, of = call.sent_bytes(world.size, world.rank), f"{list(x.shape)} float64"
        world.traffic.reset()
        all_reduce_(world, x)
        if words := wrong_bytes(world.traffic.sent_bytes, formula, world.rank, world.size, of, "a ring"):
            return words
    return None


def _one_chunk_of_scratch(world: Comm, all_reduce_: Implementation) -> str | None:
    x = torch.ones(12 * 4096, dtype=torch.float64)
    all_reduce_(world, torch.ones(12 * 4096, dtype=torch.float64))  # warm up: a Comm may keep scratch memory
    with LiveBytes() as live:
        all_reduce_(world, x)
    chunk = x.nbytes // world.size
    if live.peak > 1.5 * chunk:
        return (
            f"rank {world.rank}: {live.peak} bytes were allocated at once, {live.peak / chunk:.2g} chunks of x; "
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
    world.traffic.reset()
    all_reduce(world, x)
    sent, messages = world.traffic.sent_bytes, world.traffic.messages
    if messages > most:
        return f"rank {r}: with {p} ranks it sent {messages} messages; halving and doubling sends {most}"
    return wrong_bytes(sent, halving_bytes(x.nbytes, p, r), r, p, "24 float64", "halving and doubling")


@contextmanager
def recording_peers(world: Comm) -> Iterator[Counter[int]]:
    """Count the bytes that this rank sends, through any Comm of its world, by destination world rank."""
    sent: Counter[int] = Counter()
    post = world._transport.post

    def recorded(channel: Channel, kind: str, x: Tensor | None, to: int | None, *rest: Any) -> Any:
        if x is not None and to is not None:
            sent[channel.key.ranks[to]] += x.nbytes
        return post(channel, kind, x, to, *rest)

    with patch.object(world._transport, "post", recorded):
        yield sent


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
            f"rank {world.rank}: with {k} nodes of {g} ranks {leave} of {x.nbytes} bytes left its node; an all-reduce "
            f"of its own chunk across nodes sends {formula:g}"
        )
    inside = sum(sent.values()) - leave
    return wrong_bytes(
        inside, 2 * (g - 1) / g * x.nbytes, world.rank, world.size, "24 float64", "inside its node, a ring"
    )


def _refuses(world: Comm, hierarchical: Implementation) -> str | None:
    try:
        hierarchical(world, torch.ones(6), node_size=2)
    except ValueError:
        return None
    return f"rank {world.rank}: nodes of 2 do not divide {world.size} ranks; raise a ValueError that says so"


SPECIFICATIONS = [
    Specification(
        "shift",
        "shift(comm, x)",
        "Every rank sends x to the next rank, the last to the first, and returns what it got.",
        (
            Stage("runs", lambda f: on_ranks(_returns, f, sizes=(2, 3, 1))),
            Stage("small", lambda f: on_ranks(_shift, f, SHAPES[1:2], sizes=(2, 3))),
            Stage("drawn", lambda f: on_ranks(_shift, f)),
            Stage("bytes", lambda f: on_ranks(_one_message, f, sizes=(2, 4))),
            Stage("varied", lambda f: on_ranks(varied, f, "shift", sizes=(3, 5))),
        ),
    ),
    Specification(
        "all_reduce_",
        "all_reduce_(comm, x)",
        "x becomes the sum over ranks of x, on every rank the same bits, with one chunk of scratch memory.",
        (
            Stage("runs", lambda f: on_ranks(_returning_x, f, _returns, sizes=(1, 2))),
            Stage("small", lambda f: on_ranks(_returning_x, f, _sum_of_parts, sizes=(2, 3))),
            Stage("drawn", lambda f: on_ranks(_returning_x, f, _right_sum)),
            Stage("bytes", lambda f: on_ranks(_ring_bytes, f, sizes=(3, 4))),
            Stage("memory", lambda f: on_ranks(_one_chunk_of_scratch, f, sizes=(3, 4))),
            Stage("order", lambda f: on_ranks(_returning_x, f, same_bits, sizes=(3, 4))),
            Stage("varied", lambda f: on_ranks(_returning_x, f, _varied_sum, sizes=(3, 5))),
        ),
    ),
    Specification(
        "halving_doubling",
        "all_reduce(comm, x)",
        "The sum over ranks of x, in 2 log2 p messages; ranks beyond a power of two fold in first, and out at the end.",
        (
            Stage("runs", lambda f: on_ranks(_returns, f, sizes=(1, 2))),
            Stage("small", lambda f: on_ranks(_sum_of_parts, f, sizes=(2, 4))),
            Stage("drawn", lambda f: on_ranks(_right_sum, f)),
            Stage("bytes", lambda f: on_ranks(_few_messages, f, sizes=(2, 3, 4))),
            Stage("order", lambda f: on_ranks(same_bits, f, sizes=(3, 4))),
            Stage("varied", lambda f: on_ranks(_varied_sum, f, sizes=(3, 5, 8))),
        ),
    ),
    Specification(
        "hierarchical",
        "hierarchical(comm, x, node_size)",
        "The sum over ranks of x; of each rank's bytes only an all-reduce of a node_size-th part leaves the node.",
        (
            Stage("runs", lambda f: on_ranks(_by_nodes, f, _returns, sizes=(1, 2))),
            Stage("small", lambda f: on_ranks(_by_nodes, f, _sum_of_parts, sizes=(4,))),
            Stage("drawn", lambda f: on_ranks(_by_nodes, f, _right_sum)),
            Stage("bytes", lambda f: on_ranks(_bytes_that_leave, f, sizes=(4,))),
            Stage("order", lambda f: on_ranks(_by_nodes, f, same_bits, sizes=(4,))),
            Stage("varied", lambda f: on_ranks(_by_nodes, f, _varied_sum, sizes=(4, 5))),
            Stage("refusals", lambda f: on_ranks(_refuses, f, sizes=(3,))),
        ),
    ),
]
