"""The work that ranks really do, counted from the matrix products they run."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

import minipar
from minipar.context import causal_work
from minipar.model import flash
from tests.context.strategies import Case

SIDE = 32  # of a tile


def products(world, case: Case) -> list[int]:
    """Flops of the forward's matrix products, and of the backward's."""
    flash.TILE_ELEMS, usual = 1, flash.TILE_ELEMS
    try:
        mine = [case.local(x, world.rank).requires_grad_() for x in case.qkv()]
        with FlopCounterMode(display=False) as forward:
            out = case.split(world, *mine)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return [forward.get_total_flops(), backward.get_total_flops()]
    finally:
        flash.TILE_ELEMS = usual


def tiles_flops(case: Case, num_tiles: int) -> list[int]:
    """One product forward and three backward for each tile: torch's counter does not see those that add in place."""
    flops = 2 * SIDE**2 * case.head_dim * case.num_heads * num_tiles
    return [flops, 3 * flops]


def test_zigzag_ranks_compute_exactly_as_many_scores_as_each_other():
    """Pieces of a tile each: rank r has the r+1 tiles of its early piece and the 8-r of its late one."""
    case = Case("ring", 4, "zigzag", seq_len=8 * SIDE, impl="tiled")
    assert minipar.run(products, case, world_size=4) == [tiles_flops(case, 9)] * 4


def test_contiguous_ranks_compute_r_plus_1_of_p_blocks():
    case = Case("ring", 4, "contiguous", seq_len=4 * SIDE, impl="tiled")
    counted = minipar.run(products, case, world_size=4)
    assert counted == [tiles_flops(case, r + 1) for r in range(4)]


def seen(world, layout: str) -> int:
    """Pairs in the masks that this rank is asked to compute in its steps around the ring."""
    asked = []
    block = flash.AttentionKernel(lambda out, lse, q, k, v, mask: asked.append(mask.count()), None)
    case = Case("ring", world.size, layout, seq_len=48, impl=block)
    case.split(world, *(case.local(x, world.rank) for x in case.qkv()))
    return sum(asked)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_steps_of_the_ring_add_up_to_the_rank_s_work(layout):
    want = [causal_work(48, rank, 4, layout) for rank in range(4)]
    assert minipar.run(seen, layout, world_size=4) == want
    assert sum(want) == 48 * 49 // 2
