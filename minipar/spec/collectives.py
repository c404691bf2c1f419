"""Specifications of the collectives: right results on each rank, inputs unchanged, and the bytes of a ring or tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.comm.transport.messages import Channel
from minipar.spec.convention import stated
from minipar.spec.counted import Messages, Posted, counted, sent_by
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage
from minipar.spec.varied import strided
from minipar.spec.words import explain_sum, first, generator, mismatch, wrong_bytes
from minipar.support.chunks import chunk_sizes

MANY = (3, 5, 6, 7, 8)  # numbers of ranks on which varied inputs are tried
SHAPES = [(1,), (4,), (12, 2), (7,), (5, 3), (2,), (0,), (24,), (3, 0), (1, 4)]

# The values of a call's input: small whole numbers, exact in every dtype and order; normally distributed numbers; integers
# that a float cannot hold; nan on the first rank and inf on the last.
Values = Literal["whole", "normal", "huge", "not finite"]


@dataclass(frozen=True)
class Call:
    """One call of a collective: each rank's input, arguments and expected result.

    sizes    None: split as torch.chunk does. reduce_scatter, all_gather: one per rank. all_to_all: a list per rank
    strided  whether the input is a view that is not contiguous
    """

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    op: str = "sum"
    root: int = 0
    sizes: list[Any] | None = None
    seed: int = 0
    values: Values = field(default="whole", kw_only=True)
    strided: bool = field(default=False, kw_only=True)

    @property
    def kind(self) -> str:
        """The input in words, without its shape, such as "float64, not contiguous"."""
        words = [str(self.dtype).removeprefix("torch.")]
        if self.values in ("huge", "not finite"):
            words.append(self.values)
        if self.strided:
            words.append("not contiguous")
        return ", ".join(words)

    def arguments(self, size: int, rank: int) -> tuple[Any, ...]:
        """Return the implementation's arguments after the Comm and x."""
        if self.collective == "broadcast":
            return (self.root,)
        if self.collective != "all_to_all":
            return ()
        return self.send_sizes(size, rank), [self.send_sizes(size, source)[rank] for source in range(size)]

    def send_sizes(self, size: int, rank: int) -> list[int]:
        """Return the sizes of the chunks of `rank`'s input of an all-to-all."""
        sizes: list[int] = self.sizes[rank] if self.sizes else chunk_sizes(self.shape[0], size)
        return sizes

    def inputs(self, size: int) -> list[Tensor]:
        """Return each rank's input."""
        draw = generator(size, *self.shape, self.root, self.seed)
        xs = [self._drawn(self._input_shape(rank), draw) for rank in range(size)]
        if self.values == "not finite":
            xs[0].view(-1)[:1] = torch.nan
            xs[-1].view(-1)[1:2] = torch.inf
            if self.collective == "broadcast":  # only the root's values matter
                xs[self.root].view(-1)[:1] = torch.nan
        return xs

    def _drawn(self, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        if self.values == "normal":
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)
        if self.values == "huge":
            return torch.randint(2**58, 2**59, shape, generator=draw)
        low, high = (0, 2) if self.dtype == torch.bool else (-4, 5)
        return torch.randint(low, high, shape, generator=draw).to(self.dtype)

    def rtol(self, size: int) -> float:
        """Return the allowed rounding error, relative to the largest entry; 0 where nothing is rounded."""
        sums = self.collective in ("all_reduce", "reduce", "reduce_scatter")
        return 2 * size * torch.finfo(self.dtype).eps if sums and self.values == "normal" else 0.0

    def result(self, xs: list[Tensor], rank: int) -> Tensor | None:
        """Return the result that `rank` must get."""
        size = len(xs)
        match self.collective:
            case "all_reduce":
                return self._reduced(xs)
            case "reduce":
                return self._reduced(xs) if rank == self.root else None
            case "reduce_scatter":
                return torch.split(self._reduced(xs), self.sizes or chunk_sizes(len(xs[0]), size))[rank]
            case "all_gather":
                return torch.cat(xs)
            case "broadcast":
                return xs[self.root]
            case "shift":
                return xs[rank - 1]
        return torch.cat([x.split(self.send_sizes(size, source))[rank] for source, x in enumerate(xs)])

    def _input_shape(self, rank: int) -> tuple[int, ...]:
        if self.sizes is None or self.collective == "reduce_scatter":
            return self.shape
        sizes = self.sizes[rank]
        return (sizes if self.collective == "all_gather" else sum(sizes), *self.shape[1:])

    def _reduced(self, xs: list[Tensor]) -> Tensor:
        stacked = torch.stack(xs)
        if self.op in ("sum", "mean"):
            wide = torch.float64 if self.dtype.is_floating_point else None
            total = stacked.sum(0, dtype=wide).to(self.dtype)
            return total / len(xs) if self.op == "mean" else total
        return stacked.amax(0) if self.op == "max" else stacked.amin(0)


def calls_of(collective: str, size: int) -> list[Call]:
    """Return calls for `size` ranks: lengths that `size` divides and does not divide, lengths below `size`, and 0."""
    calls = [Call(collective, shape, root=i % size) for i, shape in enumerate(SHAPES)]
    if collective != "all_to_all":
        return calls
    # Rank r sends (r + 2 s + length) mod 4 rows to rank s, so some ranks send none to some others.
    return [
        replace(c, sizes=[[(r + 2 * s + c.shape[0]) % 4 for s in range(size)] for r in range(size)])
        for c in calls
    ]


def varied_calls(collective: str, size: int) -> list[Call]:
    """Return calls with other values, dtypes, strides and lengths, for mistakes that small whole numbers do not show."""
    call = Call(collective, (24,), root=size - 1)
    return [
        replace(call, shape=(1201, 3), values="normal"),
        replace(call, shape=(1201, 3), values="normal", seed=1),
        replace(call, shape=(40_007,), values="normal", dtype=torch.float32),
        replace(call, shape=(1500,), dtype=torch.bfloat16),
        replace(call, shape=(1003,), dtype=torch.int64, values="huge"),
        replace(call, shape=(60, 20), values="normal", strided=True),
        replace(call, values="not finite"),
    ]


def _asked(calls: list[Call], implementation: Implementation, size: int) -> list[Call]:
    """Return the calls, with equal lengths where an implementation states that it takes no others."""
    if "equal lengths" not in stated(implementation):
        return calls
    return [replace(c, shape=(-(-c.shape[0] // size) * size, *c.shape[1:]), sizes=None) for c in calls]


def _each(
    world: Comm,
    implementation: Implementation,
    collective: str,
    calls: Callable[[str, int], list[Call]],
    judge: Callable[[Comm, Implementation, Call], str | None],
) -> str | None:
    asked = _asked(calls(collective, world.size), implementation, world.size)
    return first([judge(world, implementation, call) for call in asked])


@contextmanager
def recording_peers(world: Comm) -> Iterator[Counter[int]]:
    """Count the bytes that this rank sends, by destination, in the order of first messages."""
    sent: Counter[int] = Counter()
    post = world._transport.post

    def recorded(channel: Channel, kind: str, x: Tensor | None, to: int | None, *rest: Any) -> Any:
        if x is not None and to is not None:
            sent[channel.key.ranks[to]] += x.nbytes
        return post(channel, kind, x, to, *rest)

    def posted(kind: str, messages: Messages) -> None:
        for to, num_bytes in messages:
            sent[to] += num_bytes

    with patch.object(world._transport, "post", recorded), Posted(posted):
        yield sent


def wrong(world: Comm, implementation: Implementation, call: Call) -> str | None:
    """Make the call, implementation(comm, x, *arguments); return a description of the mistake on this rank, or None."""
    xs = call.inputs(world.size)
    x = strided(xs[world.rank]) if call.strided else xs[world.rank].clone()
    got = implementation(world, x, *call.arguments(world.size, world.rank))
    what = f"the result for {list(x.shape)} of {call.kind}"
    if words := mismatch(what, got, call.result(xs, world.rank), world.size, rtol=call.rtol(world.size)):
        return words
    if got is not None and got.numel() and got.data_ptr() == x.data_ptr():
        return f"{what} is the input itself, not a tensor of its own"
    return None


def whose_part(world: Comm, implementation: Implementation, collective: str) -> str | None:
    """Check with 10**r as rank r's input, so that the digits of a sum count the additions of each rank's part.

    In a sum the digits above those tell the chunk: rank 0 adds them.
    """
    p, mine = world.size, 10**world.rank
    if collective in ("all_reduce", "reduce_scatter"):
        number_chunks = 10**p * torch.arange(p).repeat_interleave(2) * (world.rank == 0)
        got = implementation(world, mine + number_chunks)
        chunks = got.split(2) if collective == "all_reduce" and got.numel() == 2 * p else [got]
        for c, chunk in enumerate(chunks):
            number = c if collective == "all_reduce" else world.rank
            for value in chunk.tolist():
                found, total = divmod(value, 10**p)
                if words := explain_sum(total, p):
                    own = total == mine and collective == "reduce_scatter"
                    hint = "; if another chunk has the whole sum, the order is one step off" if own else ""
                    return f"chunk {number}: {words}{hint}"
                if found != number:
                    return f"chunk {number}: it is the sum of chunk {found}"
        return None
    call = _asked(calls_of(collective, p), implementation, p)[1]
    xs = [torch.full(x.shape, 10**r, dtype=torch.int64) for r, x in enumerate(call.inputs(p))]
    got = implementation(world, xs[world.rank], *call.arguments(p, world.rank))
    want = call.result(xs, world.rank)
    assert want is not None
    if got.shape == want.shape and got.dtype != want.dtype:
        return mismatch("the result", got, want)
    if got.shape != want.shape:
        return f"the result has shape {list(got.shape)}; it should have {list(want.shape)}"
    owners = {10**r: r for r in range(p)}
    for i, (a, b) in enumerate(zip(got.tolist(), want.tolist())):
        if a != b:
            from_ = f"rank {owners[a]}'s" if a in owners else f"{a}"
            return f"entry {i} of its result is {from_}; it should be rank {owners[b]}'s"
    return None


def runs(world: Comm, implementation: Implementation, collective: str) -> str | None:
    call = _asked(calls_of(collective, world.size), implementation, world.size)[1]
    x = call.inputs(world.size)[world.rank]
    got = implementation(world, x, *call.arguments(world.size, world.rank))
    return None if isinstance(got, Tensor) else f"it returned a {type(got).__name__}, not a tensor"


def _wrong_bytes(world: Comm, implementation: Implementation, call: Call) -> str | None:
    name, p, r = call.collective, world.size, world.rank
    x = call.inputs(p)[r]
    with counted(world) as sent:
        implementation(world, x, *call.arguments(p, r))
    parts = x.split(call.send_sizes(p, r)) if name in ("reduce_scatter", "all_to_all") else x
    formula = sum(num_bytes for _, num_bytes in sent_by(name, {"input": parts}, r, p)[1])
    of = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    by = "whoever keeps its own chunk" if name == "all_to_all" else "a ring"
    return wrong_bytes(sent, formula, p, of, by)


def _wrong_tree(world: Comm, broadcast: Implementation, call: Call) -> str | None:
    """Check that every rank gets x once, and all of them in ceil(log2 p) rounds, whichever the tree is.

    In a round a rank sends one message, in the order in which it sends them.
    """
    p, r = world.size, world.rank
    x = call.inputs(p)[r]
    with recording_peers(world) as sent, counted(world):
        broadcast(world, x, call.root)
    if not x.numel():
        return None
    mine = torch.tensor([*sent, *[-1] * (p - len(sent))])
    whole = world.all_gather(mine).view(p, -1).tolist()
    total = int(world.all_reduce(torch.tensor([sum(sent.values())])))
    what = f"with {p} ranks, x of {x.nbytes} bytes from rank {call.root}:"
    if total != (p - 1) * x.nbytes:
        return f"{what} all ranks together sent {total} bytes; p - 1 ranks get x, {(p - 1) * x.nbytes}"
    round_of, todo, rounds = {call.root: 0}, [call.root], (p - 1).bit_length()
    for rank in todo:
        for number, to in enumerate((to for to in whole[rank] if to >= 0), 1):
            if to not in round_of:
                round_of[to] = round_of[rank] + number
                todo.append(to)
    if (last := max(round_of.values())) > rounds and "any tree" not in stated(broadcast):
        return f"{what} the last rank gets it in round {last}; a tree takes {rounds} rounds"
    return None


def same_bits(world: Comm, implementation: Implementation) -> str | None:
    draw = generator(world.size, 7)
    xs = [torch.randn(50, generator=draw) for _ in range(world.size)]
    mine = implementation(world, xs[world.rank])
    if not torch.equal(mine, world.broadcast(mine)):
        return "its sum of float32 differs from rank 0's in rounding: ranks would drift apart"
    return None


right = partial(_each, calls=calls_of, judge=wrong)
varied = partial(_each, calls=varied_calls, judge=wrong)
ring_bytes = partial(_each, calls=calls_of, judge=_wrong_bytes)
_tree = partial(_each, calls=calls_of, judge=_wrong_tree)
KNOWN = {
    "reduce_scatter": ("equal lengths",),
    "all_to_all": ("equal lengths",),
    "broadcast": ("any tree",),
}
# What each asks besides the numbers, in words.
ALSO = {
    "all_reduce": "A rank sends what a ring sends of chunks as torch.chunk cuts them.",
    "reduce_scatter": "A rank sends what a ring sends of chunks as torch.chunk cuts them.",
    "all_gather": "A rank sends what a ring sends.",
    "broadcast": "Each rank gets x once, after ceil(log2 p) rounds at most.",
    "all_to_all": "A rank sends nothing to itself, and each chunk once.",
}


def specification(name: str, signature: str, says: str) -> Specification:
    stages = [
        Stage("runs", partial(runs, collective=name), (2, 3, 1)),
        Stage("small", partial(whose_part, collective=name), (2, 3)),
        Stage("drawn", partial(right, collective=name)),
        Stage("bytes", partial(_tree if name == "broadcast" else ring_bytes, collective=name), (3, 4)),
    ]
    if name == "all_reduce":
        stages.append(Stage("order", same_bits, (3, 4)))
    stages.append(Stage("varied", partial(varied, collective=name), MANY))
    says = f"{says} {ALSO[name]} The result is a tensor of its own."
    return Specification(name, signature, says, tuple(stages), KNOWN.get(name, ()))


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
