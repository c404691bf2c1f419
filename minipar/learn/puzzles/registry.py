"""The ten puzzles, each of which builds on earlier ones."""

from __future__ import annotations

from difflib import get_close_matches

from minipar.learn.puzzles.fsdp import FSDP
from minipar.learn.puzzles.naive_all_reduce import NAIVE_ALL_REDUCE
from minipar.learn.puzzles.one_f_one_b import ONE_F_ONE_B
from minipar.learn.puzzles.overlap import OVERLAP
from minipar.learn.puzzles.puzzle import Puzzle
from minipar.learn.puzzles.ring_all_reduce import RING_ALL_REDUCE
from minipar.learn.puzzles.ring_attention import RING_ATTENTION
from minipar.learn.puzzles.split_mlp import SPLIT_MLP
from minipar.learn.puzzles.two_halves import TWO_HALVES
from minipar.learn.puzzles.whole_mesh import WHOLE_MESH
from minipar.learn.puzzles.zero2 import ZERO2

PUZZLES = {
    puzzle.name: puzzle
    for puzzle in (
        NAIVE_ALL_REDUCE,
        RING_ALL_REDUCE,
        TWO_HALVES,
        OVERLAP,
        ZERO2,
        FSDP,
        ONE_F_ONE_B,
        SPLIT_MLP,
        RING_ATTENTION,
        WHOLE_MESH,
    )
}


def find_puzzle(name: str) -> Puzzle:
    """Return the puzzle with this name or number. Raises ValueError, which suggests the most similar name, for others."""
    if name.isdecimal() and 1 <= int(name) <= len(PUZZLES):
        return list(PUZZLES.values())[int(name) - 1]
    if name in PUZZLES:
        return PUZZLES[name]
    near = get_close_matches(name, PUZZLES, 1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(PUZZLES)}"
    raise ValueError(f"name={name!r} is no puzzle; {meant}")
