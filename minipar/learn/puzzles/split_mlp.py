"""Puzzle 8: an MLP split over ranks, with one all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipar.learn.puzzles.network import Call, Steps, World
from minipar.learn.puzzles.overlap import ring_seconds
from minipar.learn.puzzles.puzzle import Job, Limit, Puzzle, Wanted
from minipar.learn.puzzles.values import (
    Fault,
    Parts,
    Value,
    listed,
    missing_parts,
    name_of,
    parts_of,
    same_rank,
)

X_BYTES, HIDDEN_BYTES, WEIGHT_BYTES = 12_000_000, 48_000_000, 240_000_000
MATMUL_S = 8e-3  # for the product of x with a whole weight
COLUMNS, ROWS = 0, 1


class Matrix:
    """A weight in a file, from which a rank loads blocks of columns or of rows."""

    def __init__(self, world: World, rank: int, name: str) -> None:
        self._world, self._rank, self._name = world, rank, name

    def columns(self, number: int) -> Value:
        """Load a block of columns. There are as many blocks as ranks."""
        return self._block(number, COLUMNS)

    def rows(self, number: int) -> Value:
        """Load a block of rows. There are as many blocks as ranks."""
        return self._block(number, ROWS)

    def _block(self, number: int, kind: int) -> Value:
        p = self._world.num_ranks
        if not isinstance(number, int) or not 0 <= number < p:
            raise Fault(f"the weight {self._name} has blocks 0 to {p - 1}, and no block {number!r}")
        blocks = [(number, parts_of(self._name))]
        return Value(
            self._world.memories[self._rank], f"weight {self._name}", blocks, WEIGHT_BYTES // p, (kind,)
        )


# weight -> (name of its input, name of the product, bytes of the product)
PRODUCTS = {
    "weight up": ("x", "hidden", HIDDEN_BYTES),
    "weight down": ("activated hidden", "output", X_BYTES),
}


def matmul_of(world: World, rank: int) -> Callable[..., Call]:
    """Return `matmul(x, weight)`. It takes time in proportion to the block, and records the features it summed over."""
    p = world.num_ranks

    def matmul(x: Any, weight: Any) -> Call:
        def steps() -> Steps:
            if not isinstance(x, Value) or not isinstance(weight, Value) or weight.of not in PRODUCTS:
                raise Fault(
                    f"matmul is given {name_of(x)} and {name_of(weight)}; it takes a value and a block of a weight"
                )
            same_rank(x, weight)
            source, result, num_bytes = PRODUCTS[weight.of]
            if x.of != source:
                raise Fault(f"the {weight.of} multiplies the {source}, and is given the {x.of}")
            block_bytes = num_bytes // p
            (kind,), everything = weight.about, tuple(range(p))
            if kind == COLUMNS:
                if x.indices != everything:
                    raise Fault(f"columns of the {weight.of} multiply all features, and here is only {x!r}")
                out = weight.indices
            else:
                if x.indices != weight.indices:
                    named = listed(f"{i}" for i in weight.indices)
                    raise Fault(
                        f"rows {named} of the {weight.of} multiply chunk {named} of the features, and here is {x!r}"
                    )
                out = everything
            parts = parts_of(*(f"feature block {i} of {source}" for i in x.indices))
            yield from (
                world.comms[rank].compute(MATMUL_S * len(weight.indices) / p, ("F", result[0])).__await__()
            )
            return Value(world.memories[rank], result, [(i, dict(parts)) for i in out], block_bytes)

        return Call(world, rank, "matmul", steps)

    return matmul


def gelu(x: Any) -> Value:
    """Return gelu of each element. Raises Fault for a partial sum: the gelu of a sum is not the sum of gelus."""
    if not isinstance(x, Value) or x.of != "hidden":
        raise Fault(f"gelu comes after the first product, and is given {name_of(x)}")
    needed = [f"feature block {i} of x" for i in range(HIDDEN_BYTES // x.block_bytes)]
    for _, parts in x.blocks:
        missing = [name for name in needed if name not in parts]
        if missing:
            raise Fault(f"gelu of a partial sum: {missing_parts(missing)} missing in hidden")
        if any(count != 1 for count in parts.values()):
            raise Fault("gelu of a sum in which a part came more than once")
    blocks = [(index, parts_of(f"feature block {index} of hidden")) for index in x.indices]
    return Value(x._memory, "activated hidden", blocks, x.block_bytes)


def job(world: World) -> Job:
    """Return the inputs, expected results and limits for the ranks of this world."""
    p = world.num_ranks
    sent = 2 * (p - 1) / p * X_BYTES
    seconds = 2 * MATMUL_S / p + 2 * ring_seconds(world, X_BYTES)
    held = WEIGHT_BYTES / p + X_BYTES + HIDDEN_BYTES / p
    parts: Parts = parts_of(*(f"feature block {i} of activated hidden" for i in range(p)))

    def inputs(rank: int) -> tuple[Any, ...]:
        x = Value(world.memories[rank], "x", [(i, parts_of("x")) for i in range(p)], X_BYTES // p)
        return x, Matrix(world, rank, "up"), Matrix(world, rank, "down"), matmul_of(world, rank), gelu

    most = 2 * (WEIGHT_BYTES + HIDDEN_BYTES) / p + 3 * X_BYTES
    limit = Limit(most, held, "1/p of a weight and of hidden, and x")
    return Job(
        inputs=inputs,
        wanted=lambda rank: Wanted("output", tuple((i, parts) for i in range(p))),
        sent=Limit(sent, sent, "2 (p-1)/p of the output: one all-reduce"),
        seconds=Limit(seconds, seconds, "both products, 1/p each, and one all-reduce"),
        memory=(limit,) * p,
    )


SPLIT_MLP = Puzzle(
    name="mlp",
    title="A split MLP",
    minutes=15,
    lesson="04",
    task="""
Tensor parallelism. `output = gelu(x @ up) @ down`; x is the same on every rank, `hidden` is four times as wide as x.
Each rank may hold **1/p of each weight**: some block of its columns, or of its rows. A block of columns takes all
features of its input, and gives some of the output's. A block of rows takes some features, and gives all, but of each
only a partial sum, to which the other ranks' are still to be added. gelu of a partial sum is wrong, and is refused.

One all-reduce of an output is enough. Every rank returns the whole output.
""",
    given=f"x and the output have {X_BYTES // 10**6} MB, hidden {HIDDEN_BYTES // 10**6} MB, a whole weight "
    f"{WEIGHT_BYTES // 10**6} MB. A product with a whole weight would take {MATMUL_S * 1e3:g} ms.",
    stub="""\
async def program(comm, x, up, down, matmul, gelu):
    # w = up.columns(i)                 loads block i of p of the columns; up.rows(i) of the rows
    # h = await matmul(x, w)            takes time
    # a = gelu(h)                       only of finished sums
    # x.chunks(comm.size)               features 0.., 1/p to a chunk
    # y = await comm.all_reduce(h)      the sum over all ranks; comm.all_gather joins chunks
    raise NotImplementedError
""",
    hints=(
        "The first weight's columns: each rank computes features of its own, whole, so gelu needs nobody.",
        "A rank that has features r needs exactly the rows r of the second weight.",
        "What comes out has all features, but in each only one rank's part: `comm.all_reduce`.",
    ),
    answer="""\
async def program(comm, x, up, down, matmul, gelu):
    hidden = gelu(await matmul(x, up.columns(comm.rank)))
    return await comm.all_reduce(await matmul(hidden, down.rows(comm.rank)))
""",
    sizes=(4, 2),
    job=job,
)
