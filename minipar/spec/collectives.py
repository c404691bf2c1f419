"""Specifications of the collectives: the right sum on the right rank, nobody's input written to, and the ring's bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minipar.chunks import chunk_sizes
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, first, generator, parts, wrong_bytes

SHAPES = [(1,), (4,), (12, 2), (7,), (5, 3), (2,), (0,), (24,), (3, 0), (1, 4)]


class Call(NamedTuple):
    """One call: its collective, what rank r brings, and what rank r must get back, from all ranks' inputs."""

    collective: str
    shape: tuple[int, ...]
    root: int = 0
    dtype: torch.dtype = torch.float64

    def arguments(self, size: int, rank: int) -> tuple:
        if self.collective == "broadcast":
            return (self.root % size,)
        return tuple(self._sizes(size, rank)) if self.collective == "all_to_all" else ()

    def inputs(self, size: int) -> list[Tensor]:
        """Small whole numbers, so that sums are exact in any order."""
        draw = generator(size, *self.shape, self.root)
        shapes = [self._shape_of(size, rank) for rank in range(size)]
        return [torch.randint(-4, 5, shape, generator=draw).to(self.dtype) for shape in shapes]

    def result(self, xs: list[Tensor], rank: int) -> Tensor:
        size = len(xs)
        match self.collective:
            case "all_reduce":
                return sum(xs)
            case "reduce_scatter":
                return sum(xs).split(chunk_sizes(len(xs[0]), size))[rank]
            case "all_gather":
                return torch.cat(xs)
            case "broadcast":
                return xs[self.root % size]
        sent = [self._sizes(size, source)[0] for source in range(size)]
        return torch.cat([x.split(sizes)[rank] for x, sizes in zip(xs, sent)])

    def sent_bytes(self, size: int, rank: int) -> int:
        """What a ring, a tree or a pairwise exchange sends from this rank."""
        length, row = self.shape[0], torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        elems = length * torch.Size(self.shape[1:]).numel()
        sizes, right = chunk_sizes(length, size), (rank + 1) % size
        match self.collective:
            case "all_reduce":  # of the flattened vector; all of it twice, less two chunks
                flat = chunk_sizes(elems, size)
                return (2 * elems - flat[rank] - flat[right]) * self.dtype.itemsize if size > 1 else 0
            case "reduce_scatter":
                return (length - sizes[rank]) * row
            case "all_gather":
                return (size - 1) * length * row
            case "broadcast":
                return _tree_children(size, (rank - self.root) % size) * length * row
        send, _ = self._sizes(size, rank)
        return (sum(send) - send[rank]) * row

    def _shape_of(self, size: int, rank: int) -> tuple[int, ...]:
        if self.collective == "all_to_all":
            return (sum(self._sizes(size, rank)[0]), *self.shape[1:])
        return self.shape

    def _sizes(self, size: int, rank: int) -> tuple[list[int], list[int]]:
        """Rows from rank r to rank s: (r + 2 s + rows) mod 4, none among them."""
        rows = lambda r, s: (r + 2 * s + self.shape[0]) % 4  # noqa: E731
        return [rows(rank, s) for s in range(size)], [rows(s, rank) for s in range(size)]


def _tree_children(size: int, place: int) -> int:
    """How many ranks the one at this place, counted from the root, tells in a binomial tree."""
    distance = 1 << (size - 1).bit_length()
    lowest = place & -place if place else distance
    return sum(place + (lowest >> i) < size for i in range(1, lowest.bit_length()))


def wrong(world, implementation, calls: list[Call]) -> str | None:
    """The first of these calls whose result is wrong here, in words."""
    return first([_wrong_in(world, implementation, call) for call in calls])


def _wrong_in(world, implementation, call: Call) -> str | None:
    xs = call.inputs(world.size)
    x = xs[world.rank].clone()
    got = implementation(world, x, *call.arguments(world.size, world.rank))
    what = f"rank {world.rank}: the result for {list(x.shape)}"
    if words := differs(what, got, call.result(xs, world.rank), world.size, rtol=0.0):
        return words
    if not torch.equal(x, xs[world.rank]):
        return f"rank {world.rank}: the input {list(x.shape)} was written to"
    if got.numel() and got.data_ptr() == x.data_ptr():
        return (
            f"rank {world.rank}: the result for {list(x.shape)} is the input itself, not a tensor of its own"
        )
    return None


def _whose_part(world, implementation, collective: str) -> str | None:
    """Rank r brings 10**r: the digits of a sum say whose part came how often."""
    p, mine = world.size, 10**world.rank
    if collective in ("all_reduce", "reduce_scatter"):
        got = implementation(world, torch.full((2 * p,), mine))
        chunks = got.split(2) if collective == "all_reduce" and got.numel() == 2 * p else [got]
        for c, chunk in enumerate(chunks):
            for value in chunk.tolist():
                if words := parts(value, p):
                    number = c if collective == "all_reduce" else world.rank
                    return f"rank {world.rank}: chunk {number} on rank {world.rank} of {p}: {words}"
        return None
    call = Call(collective, (2,), root=1)
    xs = [torch.full(x.shape, 10**r, dtype=torch.int64) for r, x in enumerate(call.inputs(p))]
    got = implementation(world, xs[world.rank], *call.arguments(p, world.rank))
    want = call.result(xs, world.rank)
    if got.shape != want.shape:
        return f"rank {world.rank}: the result has shape {list(got.shape)}; it should have {list(want.shape)}"
    owners = {10**r: r for r in range(p)}
    for i, (a, b) in enumerate(zip(got.tolist(), want.tolist())):
        if a != b:
            from_ = f"rank {owners[a]}'s" if a in owners else f"{a}"
            return f"rank {world.rank}: entry {i} on rank {world.rank} of {p} is {from_}; it should be rank {owners[b]}'s"
    return None


def _runs(world, implementation, collective: str) -> str | None:
    call = Call(collective, (2 * world.size,))
    x = call.inputs(world.size)[world.rank]
    got = implementation(world, x, *call.arguments(world.size, world.rank))
    return (
        None
        if isinstance(got, Tensor)
        else f"rank {world.rank}: it returned a {type(got).__name__}, not a tensor"
    )


def _bytes(world, implementation, calls: list[Call]) -> str | None:
    return first([_wrong_bytes_in(world, implementation, call) for call in calls])


def _wrong_bytes_in(world, implementation, call: Call) -> str | None:
    x = call.inputs(world.size)[world.rank]
    world.traffic.reset()
    implementation(world, x, *call.arguments(world.size, world.rank))
    formula, name = call.sent_bytes(world.size, world.rank), SENDERS[call.collective]
    of = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    return wrong_bytes(world.traffic.sent_bytes, formula, world.rank, world.size, of, name)


def _same_bits(world, implementation) -> str | None:
    draw = generator(world.size, 7)
    xs = [torch.randn(50, generator=draw) for _ in range(world.size)]
    mine = implementation(world, xs[world.rank])
    if not torch.equal(mine, world.broadcast(mine)):
        return f"rank {world.rank}: its sum of float32 differs from rank 0's in rounding: ranks would drift apart"
    return None


SENDERS = {
    "all_reduce": "a ring",
    "reduce_scatter": "a ring",
    "all_gather": "a ring",
    "broadcast": "a binomial tree",
    "all_to_all": "whoever keeps its own chunk",
}


def specification(name: str, signature: str, says: str) -> Specification:
    calls = [Call(name, shape, root) for root, shape in enumerate(SHAPES)]
    if name == "all_gather":
        calls = [call for call in calls if call.shape[0]]
    stages = [
        Stage("runs", lambda f: on_ranks(_runs, f, name, sizes=(2, 3, 1))),
        Stage("small", lambda f: on_ranks(_whose_part, f, name, sizes=(2, 3))),
        Stage("drawn", lambda f: on_ranks(wrong, f, calls)),
        Stage("bytes", lambda f: on_ranks(_bytes, f, calls, sizes=(3, 4))),
    ]
    if name == "all_reduce":
        stages.append(Stage("order", lambda f: on_ranks(_same_bits, f, sizes=(3, 4))))
    return Specification(name, signature, says, tuple(stages))


SPECIFICATIONS = [
    specification(
        "reduce_scatter", "reduce_scatter(comm, x)", "Rank r gets chunk r of the sum over ranks of x."
    ),
    specification("all_gather", "all_gather(comm, chunk)", "Every rank gets all chunks, in rank order."),
    specification(
        "all_reduce", "all_reduce(comm, x)", "Every rank gets the sum over ranks of x, the same bits."
    ),
    specification("broadcast", "broadcast(comm, x, root)", "Every rank gets the root's x."),
    specification(
        "all_to_all",
        "all_to_all(comm, x, send_sizes, recv_sizes)",
        "Chunk s of rank r's x is chunk r of rank s's result.",
    ),
]
