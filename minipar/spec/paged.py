"""Specification of a paged cache: allocating and releasing blocks, and attention through block tables."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage
from minipar.spec.varied import KINDS, PLAIN, Kind
from minipar.spec.words import FLOOR, first, generator, mismatch, normal, wrong_entries

# (block size, sequences as (cached tokens, new tokens)), the smallest first
Shape = tuple[int, list[tuple[int, int]]]
SMALL: list[Shape] = [(4, [(0, 2)]), (2, [(0, 3)]), (2, [(3, 1)]), (2, [(2, 1), (0, 2)])]
DRAWN: list[Shape] = [
    (1, [(0, 1), (3, 1)]),
    (3, [(3, 3), (2, 1), (0, 5)]),
    (2, [(4, 0), (1, 1)]),
    (4, [(3, 1), (4, 4), (7, 2), (0, 1)]),
    (16, [(5, 1), (15, 1), (16, 1), (0, 17)]),
    (3, [(6, 1)] * 5),
]
LARGE: Shape = (16, [(100, 1), (31, 33), (0, 40)])
GARBAGE = (
    100.0  # magnitude of the values that earlier sequences left in the blocks; for odd seeds they are nan
)


class Case(NamedTuple):
    """One attention pass: the memory before it, (new tokens, start, block table) of each sequence, and all q, k, v."""

    size: int
    memory: Tensor  # [2, number, size, H, d]
    pieces: list[tuple[list[int], int, list[int]]]
    rows: list[Tensor]  # q, k, v [N, H, 1, d]

    @classmethod
    def of(cls, shape: Shape, seed: int, kind: Kind = PLAIN, spare: int = 0) -> Case:
        size, texts = shape
        lengths = [-(-(begin + new) // size) + spare for begin, new in texts]
        number, H, d = sum(lengths) + 2, 1 + seed % 3, 3 + seed % 2 * 2
        blocks = Random(seed).sample(range(number), sum(lengths))
        draw = generator(size, number, seed, kind.seed)
        memory = GARBAGE * normal(draw, 2, number, size, H, d)
        if seed % 2:
            memory.fill_(torch.nan)  # it may never reach a result: masked after a softmax, it is 0 x nan
        pieces, first_block = [], 0
        for (begin, new), length in zip(texts, lengths):
            table = blocks[first_block : first_block + length]
            first_block += length
            for t in range(begin):
                memory[:, table[t // size], t % size] = normal(draw, 2, H, d)
            pieces.append(([1] * new, begin, table))
        q, k, v = (kind.rounded(normal(draw, sum(new for _, new in texts), H, 1, d)) for _ in range(3))
        return cls(size, kind.rounded(memory), pieces, [kind.with_nan(q), k, v])

    def __str__(self) -> str:
        texts = ", ".join(f"{begin} + {len(new)} in {table}" for new, begin, table in self.pieces[:4])
        return f"blocks of {self.size}, old + new tokens {texts}"

    def due(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return a dict from (block, offset in the block) to (sequence, token), for each new token."""
        return {
            (table[t // self.size], t % self.size): (i, t)
            for i, (new, begin, table) in enumerate(self.pieces)
            for t in range(begin, begin + len(new))
        }

    def written(self) -> Tensor:
        """Return the memory as it should be after the pass."""
        memory = self.memory.clone()
        for row, (block, place) in enumerate(self.due()):
            memory[:, block, place] = torch.stack([x[row, :, 0] for x in self.rows[1:]])
        return memory


def _right(implementation: Any, case: Case, kind: Kind = PLAIN) -> str | None:
    memory, rows = kind.given(case.memory), [kind.given(x) for x in case.rows]
    pieces = [(list(new), begin, list(table)) for new, begin, table in case.pieces]
    out = implementation.paged_attention(memory, case.size, pieces, *rows)
    what = f"{case}{', ' + kind.words if kind.words else ''}"
    if words := _wrong_memory(case, memory, kind):
        return f"{what}: {words}"
    shape, dtype = case.rows[0].shape, kind.dtype
    if not isinstance(out, Tensor) or out.shape != shape:
        return f"{what}: {mismatch('the output', out, torch.empty(shape, dtype=dtype))}"
    row, full = 0, case.written()
    for i, (new, begin, table) in enumerate(case.pieces):
        own = slice(row, row + len(new))
        row += len(new)
        end = begin + len(new)
        keys, values = (x[None] for x in full[:, table].flatten(1, 2)[:, :end].transpose(1, 2))
        q = case.rows[0][own].permute(2, 1, 0, 3)
        got = out[own].permute(2, 1, 0, 3)
        want = plain_attention(q, keys, values)
        if words := kind.mismatch(f"the output of text {i}", got, want):
            return f"{what}: {words}{_cause(got, q, full, table, begin, end, kind)}"
    return None


def _wrong_memory(case: Case, memory: Tensor, kind: Kind) -> str | None:
    """Describe the first slot that was wrongly written, or wrongly left unwritten."""
    want = case.written().to(kind.dtype)
    wrong = wrong_entries(memory, want, FLOOR).nonzero()
    if not len(wrong):
        return None
    what, block, place = wrong[0].tolist()[:3]
    slot = f"the {('key', 'value')[what]} in block {block} at place {place}"
    if (block, place) not in case.due():
        holders = [i for i, (_, _, table) in enumerate(case.pieces) if block in table]
        whose = f"of text {holders[0]}" if holders else "of no text"
        return f"{slot}, {whose}, was written to; no new token is due there"
    text, token = case.due()[block, place]
    what_is = f"{slot}, of token {token} of text {text},"
    return mismatch(what_is, memory[what, block, place], want[what, block, place], rtol=0.0)


def _cause(got: Tensor, q: Tensor, full: Tensor, table: list[int], begin: int, end: int, kind: Kind) -> str:
    """Name the usual mistake that gives this output, if one does."""
    slots, contents = full[:, table].flatten(1, 2).transpose(1, 2).unsqueeze(1)
    keys, values = slots[:, :, :end], contents[:, :, :end]
    causes = {
        "it sees this pass's tokens alone": plain_attention(q, keys[:, :, begin:], values[:, :, begin:]),
        "queries see later tokens of their piece": plain_attention(q, keys, values, causal=False),
        "it sees the unused end of the last block": plain_attention(q, slots, contents, causal=False),
        "scores are not divided by sqrt(d)": plain_attention(q * q.shape[3] ** 0.5, keys, values),
    }
    want = plain_attention(q, keys, values)
    for words, tensor in causes.items():
        if mismatch("", want, tensor) and kind.mismatch("", got, tensor) is None:
            return f": {words}"
    return ""


def _pool(implementation: Any, num_blocks: int, moves: str) -> str | None:
    """Allocate a block (+), or release the n-th allocated one (a digit n), move by move; describe the first mistake."""
    pool, held, taken = implementation.BlockPool(num_blocks, 4), set[int](), list[int]()
    for n, move in enumerate(moves):
        what = f"BlockPool({num_blocks}, 4), {' '.join(moves[: n + 1])} (+: allocate, a number: release that block)"
        if move != "+":
            pool.release(taken[int(move)])
            held.discard(taken[int(move)])
            continue
        try:
            block = pool.allocate()
        except RuntimeError as error:
            return f"{what}: allocate raised RuntimeError: {error}; {num_blocks - len(held)} of {num_blocks} blocks is free"
        if not isinstance(block, int) or not 0 <= block < num_blocks:
            return f"{what}: allocate returned {block!r}; a block is a number from 0 to {num_blocks - 1}"
        if block in held:
            return f"{what}: allocate returned block {block}, which is held: two texts would write to it"
        held.add(block)
        taken.append(block)
    return None


# The digits count allocations: 0 is the block that was taken first.
MOVES = {
    1: ["+", "+0+1+"],
    2: ["++", "++0+", "++10++"],
    3: ["+++", "+0+1++", "+++120+++"],
    7: ["+++0++2+15+++"],
}


def _small(implementation: Any) -> str | None:
    cases = [Case.of(shape, seed) for seed, shape in enumerate(SMALL)]
    return first(_right(implementation, case) for case in cases) or _pool(implementation, 2, "++0+")


def _drawn(implementation: Any) -> str | None:
    for number, several in MOVES.items():
        if words := first(_pool(implementation, number, moves) for moves in several):
            return words
    for seed, shape in enumerate(DRAWN):
        for spare in (0, 2):
            if words := _right(implementation, Case.of(shape, seed, spare=spare)):
                return words
    return None


def _varied(implementation: Any) -> str | None:
    for kind in KINDS:
        case = Case.of(LARGE if kind.large else DRAWN[1], 5 if kind.large else 1, kind)
        if words := _right(implementation, case, kind):
            return words
    return first(_pool(implementation, n, "+" * n) for n in (100, 1000))


def _refuses(implementation: Any) -> str | None:
    def taken(number: int) -> tuple[Any, list[int]]:
        pool = implementation.BlockPool(number, 4)
        return pool, [pool.allocate() for _ in range(number)]

    pool, blocks = taken(2)
    if words := _not_refused("allocate with every block held", pool.allocate):
        return words
    pool.release(blocks[0])
    if words := _not_refused(
        f"block {blocks[0]} freed twice: the second release", partial(pool.release, blocks[0])
    ):
        return words
    again = pool.allocate()
    if words := _not_refused("allocate with every block held again", pool.allocate):
        return words
    pool.release(again)
    fresh = implementation.BlockPool(2, 4)
    return _not_refused("release of a block that was never taken", partial(fresh.release, 0))


def _not_refused(what: str, call: Any) -> str | None:
    try:
        got = call()
    except RuntimeError:
        return None
    except Exception as error:
        return f"{what} raised {type(error).__name__}: {error}; raise a RuntimeError"
    return f"{what} returned {got!r}; raise a RuntimeError"


def _runs(implementation: Implementation) -> str | None:
    return _pool(implementation, 1, "+") or _right(implementation, Case.of((1, [(0, 1)]), 0))


SPECIFICATIONS = [
    Specification(
        "paged_attention",
        "BlockPool(num_blocks, block_size).allocate(), .release(block); paged_attention(memory, size, pieces, q, k, v)",
        "New tokens of several texts are written to the blocks of their tables, and attend to their own text so far.",
        (
            Stage("runs", _runs, (), (0,)),
            Stage("small", _small, (), (0,)),
            Stage("drawn", _drawn, (), (0,)),
            Stage("varied", _varied, (), (0,)),
            Stage("refusals", _refuses, ()),
        ),
    )
]
