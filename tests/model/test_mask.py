import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.model.mask import Mask, TokenRun, indices, single_process_mask


@st.composite
def masks(draw, documents=None):
    """Queries and keys that are runs of one step, as layouts make them, or of any."""
    step = draw(st.integers(1, 3))

    def runs(least):
        return tuple(
            TokenRun(start, length, step)
            for start, length in draw(
                st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=least, max_size=3)
            )
        )

    queries, keys = runs(1), runs(1)
    causal = draw(st.booleans())
    end = draw(st.none() | st.integers(0, 25))
    positions = None
    if causal and (draw(st.booleans()) if documents is None else documents):
        batch = draw(st.integers(1, 3))
        index = indices(queries)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        positions = (index - torch.randint(0, 9, (batch, len(index)), generator=generator)).clamp(min=0)
        positions = positions[0] if draw(st.booleans()) else positions
    return Mask(queries, keys, causal, positions, end)


def seen_by_definition(mask: Mask) -> torch.Tensor:
    queries, keys = indices(mask.queries)[:, None], indices(mask.keys)
    seen = (keys <= queries) if mask.causal else torch.ones(len(queries), len(keys), dtype=torch.bool)
    if mask.end is not None:
        seen = seen & (keys < mask.end)
    if mask.positions is not None:
        start = queries[:, 0] - mask.positions
        seen = seen & (keys >= start[..., None])
        seen = seen if seen.dim() == 2 else seen[:, None]
    return seen


@given(masks())
def test_the_range_of_each_query_is_the_mask(mask):
    seen = seen_by_definition(mask)
    assert torch.equal(~mask.hidden(), seen)
    assert mask.count() == seen.sum()


@given(masks(), st.integers(1, 9))
def test_tiles_hold_all_that_is_seen(mask, side):
    seen = torch.zeros_like(mask.hidden())
    for rows, blocks in mask.tiles(side):
        for cols, hidden in blocks:
            seen[..., rows, cols] = True if hidden is None else ~hidden
    assert torch.equal(seen, ~mask.hidden())


@given(masks(documents=False))
def test_rectangles_and_triangles_are_the_mask_and_do_not_overlap(mask):
    times_seen = torch.zeros(mask.hidden().shape, dtype=torch.int64)
    for rows, cols, is_causal in mask.regions():
        height, width = rows.stop - rows.start, cols.stop - cols.start
        assert height > 0
        assert width > 0
        assert height == width or not is_causal
        ones = torch.ones(height, width, dtype=torch.int64)
        times_seen[rows, cols] += ones.tril() if is_causal else ones
    assert torch.equal(times_seen, (~mask.hidden()).long())


def test_two_runs_never_need_more_than_three_parts():
    for start in range(-9, 9):
        mask = Mask((TokenRun(10 + start, 5),), (TokenRun(10, 7),))
        assert len(list(mask.regions())) <= 3
    assert list(single_process_mask(6, 6, True).regions()) == [(slice(0, 6), slice(0, 6), True)]
    assert list(single_process_mask(6, 4, False).regions()) == [(slice(0, 6), slice(0, 4), False)]


def test_what_cannot_be_is_refused():
    positions = torch.arange(4)
    with pytest.raises(ValueError, match="use causal=True"):
        single_process_mask(4, 4, False, positions)
    with pytest.raises(ValueError, match="use impl='tiled'"):
        list(single_process_mask(4, 4, True, positions).regions())
    with pytest.raises(ValueError, match="runs of steps 2 and 1"):
        list(Mask((TokenRun(0, 3, 2),), (TokenRun(0, 3, 1),)).regions())
