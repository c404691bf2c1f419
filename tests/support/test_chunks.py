"""Chunk sizes: torch.chunk's, and sizes of one's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.support.chunks import bounds, check_sizes, chunk_sizes


@given(st.integers(0, 60), st.integers(1, 12))
def test_sizes_are_those_of_torch_chunk_and_then_zeros(length, count):
    of_torch = [len(x) for x in torch.arange(length).chunk(count)] if length else []
    sizes = chunk_sizes(length, count)
    assert sizes == of_torch + [0] * (count - len(of_torch))
    assert check_sizes(None, length, count, "sizes") == check_sizes(sizes, length, count, "sizes") == sizes
    at = bounds(sizes)
    assert (at[0], at[-1], len(at)) == (0, length, count + 1)
    assert [stop - start for start, stop in zip(at, at[1:])] == sizes


def test_sizes_of_ones_own_are_whole_numbers_that_cut_all_of_it():
    assert check_sizes(torch.tensor([3, 0, 2]), 5, 3, "sizes") == [3, 0, 2]
    for wrong in ([3, 2], [3, 2, 0, 0], [4, 2, -1], [3, 1, 0], [3, 3, 0]):
        says = rf"sizes=\[{', '.join(map(str, wrong))}\] does not cut dim 1 of length 5 into 3 parts"
        with pytest.raises(ValueError, match=says):
            check_sizes(wrong, 5, 3, "sizes", 1)
    with pytest.raises(ValueError, match="does not cut dim 0 of length 4"):
        check_sizes([5], 4, 1, "sizes")
