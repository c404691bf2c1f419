"""Specification of a paged cache: allocating and releasing blocks, and attention through block tables."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.spec.question import Asked, Given, Question, specification
from minipar.spec.specification import Stage
from minipar.spec.varied import Kind
from minipar.spec.words import Wrong, first, generator, mismatch, normal, wrong_entries

# (block size, sequences as (cached tokens, new tokens)), by seed
Shape = tuple[int, list[tuple[int, int]]]
SHAPES: dict[int, Shape] = {
    0: (1, [(0, 1)]),
    1: (2, [(0, 2), (0, 3), (3, 1), (2, 1)]),
    2: (1, [(0, 1), (3, 1)]),
    3: (3, [(3, 3), (2, 1), (0, 5)]),
    4: (2, [(4, 0), (1, 1)]),
    5: (3, [(3, 3), (2, 1), (0, 5)]),
    6: (4, [(3, 1), (4, 4), (7, 2), (0, 1)]),
    7: (16, [(5, 1), (15, 1), (16, 1), (0, 17)]),
    8: (3, [(6, 1)] * 5),
}
LARGE: Shape = (16, [(100, 1), (31, 33), (0, 40)])
SPARE = 10  # from this seed on tables have two blocks more than are needed
# Magnitude of the values that earlier sequences left in the blocks; for odd seeds they are nan.
GARBAGE = 100.0


def draw(shape: Shape, seed: int, kind: Kind) -> Given:
    """Draw a pass: memory [2, number, size, H, d], (new tokens, start, table) of each text, and q, k, v [N, H, 1, d]."""
    size, texts = shape
    lengths = [-(-(begin + new) // size) + 2 * (seed >= SPARE) for begin, new in texts]
    number, H, d = sum(lengths) + 2, 1 + seed % 3, 3 + seed % 2 * 2
    blocks = Random(seed).sample(range(number), sum(lengths))
    numbers = generator(size, number, seed, kind.seed)
    memory = GARBAGE * normal(numbers, 2, number, size, H, d)
    if seed % 2:
        memory.fill_(torch.nan)  # it may never reach a result: masked after a softmax, it is 0 x nan
    pieces = []
    for (begin, new), length in zip(texts, lengths):
        table, blocks = blocks[:length], blocks[length:]
        for t in range(begin):
            memory[:, table[t // size], t % size] = normal(numbers, 2, H, d)
        pieces.append(([1] * new, begin, table))
    q, k, v = (kind.rounded(normal(numbers, sum(new for _, new in texts), H, 1, d)) for _ in range(3))
    given = {"memory": kind.rounded(memory), "size": size, "pieces": pieces}
    return [{**given, "q": kind.with_nan(q), "k": k, "v": v}]


def _due(size: int, pieces: list[Any]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return a dict from (block, offset in the block) to (sequence, token), for each new token."""
    return {
        (table[t // size], t % size): (i, t)
        for i, (new, begin, table) in enumerate(pieces)
        for t in range(begin, begin + len(new))
    }


def _written(memory: Tensor, size: int, pieces: list[Any], k: Tensor, v: Tensor) -> Tensor:
    """Return the memory as it should be after the pass."""
    memory = memory.clone()
    for row, (block, place) in enumerate(_due(size, pieces)):
        memory[:, block, place] = torch.stack((k[row, :, 0], v[row, :, 0]))
    return memory


def _pass(
    paged: Any, world: object, memory: Tensor, size: int, pieces: list[Any], q: Tensor, k: Tensor, v: Tensor
) -> Any:
    """Make the pass; describe the first slot that was wrongly written, or wrongly left unwritten."""
    want, due = _written(memory, size, pieces, k, v), _due(size, pieces)
    out = paged.paged_attention(memory, size, pieces, q, k, v)
    for what, block, place, *_ in wrong_entries(memory, want).nonzero().tolist():
        slot = f"the {('key', 'value')[what]} in block {block} at place {place}"
        if (block, place) in due:
            text, token = due[block, place]
            words = mismatch("", memory[what, block, place], want[what, block, place], rtol=0.0)
            raise Wrong(f"{slot}, of token {token} of text {text},{words}{_shape(size, pieces)}")
        holders = [f"text {i}" for i, (_, _, table) in enumerate(pieces) if block in table]
        raise Wrong(f"{slot}, of {(*holders, 'no text')[0]}, was written to; no new token is due there")
    return out


def _outputs(mine: dict[str, Any], see: str = "text", power: float = 0.0, causal: bool = True) -> Tensor:
    """Return the outputs of queries times head_dim ** power, which see these tokens."""
    full = _written(mine["memory"], mine["size"], mine["pieces"], mine["k"], mine["v"])
    rows, outs = (mine["q"] * mine["q"].shape[3] ** power).permute(2, 1, 0, 3), []
    for new, begin, table in mine["pieces"]:
        end = begin + len(new)
        seen = {"text": slice(end), "new": slice(begin, end), "slots": slice(None)}[see]
        k, v = full[:, table].flatten(1, 2)[:, seen].transpose(1, 2).unsqueeze(1)
        q, rows = rows[:, :, : len(new)], rows[:, :, len(new) :]
        outs.append(plain_attention(q, k, v, causal))
    return torch.cat(outs, 2).permute(2, 1, 0, 3)


CAUSES: dict[str, dict[str, Any]] = {
    "it sees this pass's tokens alone": {"see": "new"},
    "queries see later tokens of their piece": {"causal": False},
    "it sees the unused end of the last block": {"see": "slots", "causal": False},
    "scores are not divided by sqrt(d)": {"power": 0.5},
}


def _cause(asked: Asked, got: Tensor) -> str:
    """Say which texts there are, and name the usual mistake that gives this output, if one does."""
    mine = asked.given[0]
    causes = [
        f": {words}"
        for words, mistake in CAUSES.items()
        if asked.kind.mismatch("", got, _outputs(mine, **mistake)) is None
    ]
    return "".join([_shape(mine["size"], mine["pieces"]), *causes[:1]])


def _shape(size: int, pieces: list[Any]) -> str:
    texts = ", ".join(f"{begin} + {len(new)} in {table}" for new, begin, table in pieces[:4])
    return f" (blocks of {size}, old + new tokens {texts})"


ATTENTION = Question(
    lambda size, seed, kind: draw(LARGE if kind.large else SHAPES[seed % SPARE], seed, kind),
    lambda given: [[_outputs(given[0])]],
    ("the output",),
    call=_pass,
    differentiated=False,
    cause=_cause,
    seeds=(2, 3, 4, 6, 7, 8, 12, 13, 14, 16, 17, 18),
)


def _pool(implementation: Any, num_blocks: int, moves: str) -> str | None:
    """Allocate a block (+), or release the n-th allocated one (a digit n), move by move; describe the first mistake."""
    pool, held, taken = implementation.BlockPool(num_blocks, 4), set[int](), list[int]()
    for n, move in enumerate(moves):
        what = f"BlockPool({num_blocks}, 4), {' '.join(moves[: n + 1])} (+: allocate, a number: release that block)"
        allocates, index = move == "+", 0 if move == "+" else int(move)
        block = taken[index] if taken else index
        free = num_blocks - len(held)
        impossible = free == 0 if allocates else block not in held
        try:
            got = pool.allocate() if allocates else pool.release(block)
        except RuntimeError as error:
            if impossible:
                continue
            return f"{what}: it raised RuntimeError: {error}; {free} of {num_blocks} blocks is free"
        if impossible:
            why = "every block is held" if allocates else f"block {block} is not held"
            return f"{what}: it returned {got!r}; {why}: raise a RuntimeError"
        if not allocates:
            held.remove(block)
            continue
        if not isinstance(got, int) or not 0 <= got < num_blocks:
            return f"{what}: allocate returned {got!r}; a block is a number from 0 to {num_blocks - 1}"
        if got in held:
            return f"{what}: allocate returned block {got}, which is held: two texts would write to it"
        held.add(got)
        taken.append(got)
    return None


# The digits count allocations: 0 is the block that was taken first.
MOVES = {
    1: ["+", "+0+1+"],
    2: ["++", "++0+", "++10++"],
    3: ["+++", "+0+1++", "+++120+++"],
    7: ["+++0++2+15+++"],
    100: ["+" * 100],
    1000: ["+" * 1000],
}
REFUSED = {2: ["+++", "++00", "++0++", "0"]}


def _pools(implementation: Any, of: dict[int, list[str]]) -> str | None:
    return first(_pool(implementation, number, moves) for number, several in of.items() for moves in several)


SPECIFICATIONS = [
    specification(
        "paged_attention",
        "BlockPool(num_blocks, block_size).allocate(), .release(block); paged_attention(memory, size, pieces, q, k, v)",
        "New tokens of several texts are written to the blocks of their tables, and attend to their own text so far.",
        [ATTENTION],
        [
            Stage("runs", partial(_pools, of={1: ["+"]}), ()),
            Stage("drawn", partial(_pools, of=MOVES), ()),
            Stage("refusals", partial(_pools, of=REFUSED), ()),
        ],
        alone=True,
        writes=(0,),
    )
]
